{{/* What pods of all components share. */}}

{{/* dict "root" $ "image" {...} "fallback" "headway/gateway" */}}
{{- define "headway.image" -}}
{{- $image := .image | default dict }}
{{- $shared := .root.Values.image | default dict }}
{{- $repository := $image.repository | default .fallback }}
{{- if $shared.registry }}{{ $repository = printf "%s/%s" (trimSuffix "/" $shared.registry) $repository }}{{ end }}
{{- if $image.digest }}{{ printf "%s@%s" $repository $image.digest }}
{{- else }}{{ printf "%s:%s" $repository ($image.tag | default $shared.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* A flag with a whole number, never 1e+06; nothing when the value is absent. dict "flag" "--x" "value" v */}}
{{- define "headway.number" -}}
{{- if not (kindIs "invalid" .value) }}
- {{ printf "%s=%d" .flag (int64 .value) | toJson }}
{{- end }}
{{- end }}

{{/* A flag with text exactly as given: `$(` would be read as a variable. dict "flag" "--x" "value" v */}}
{{- define "headway.text" -}}
{{- if .value }}
- {{ printf "%s=%s" .flag (.value | replace "$(" "$$(") | toJson }}
{{- end }}
{{- end }}

{{- define "headway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* preStop, then draining, then a margin: one value makes them agree. The sleep is how long others may still route here. */}}
{{- define "headway.preStopSeconds" }}5{{ end }}
{{- define "headway.drain" }}{{ kindIs "invalid" . | ternary 30 . | int64 }}{{ end }}
{{- define "headway.grace" }}{{ add (include "headway.preStopSeconds" . | int64) (include "headway.drain" . | int64) 10 }}{{ end }}

{{/* dict "root" $ "values" {...}: the part of a pod's spec that does not depend on the component */}}
{{- define "headway.podSpec" -}}
{{- with .root.Values.podSecurityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with (.root.Values.image).pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with get $.values $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Labels of a pod: no version in them, or every upgrade would restart every pod. dict as for headway.selector, and "values", "extra" */}}
{{- define "headway.podLabels" -}}
{{- $own := include "headway.selector" . | fromYaml }}
{{- toYaml (merge $own (.extra | default dict) (.root.Values.commonLabels | default dict) (.values.podLabels | default dict)) }}
{{- end }}

{{/* One pool with what all pools have in common filled in; null counts as absent. dict "root" $ "pool" {...} */}}
{{- define "headway.pool" -}}
{{- $merged := deepCopy (.root.Values.runtime | default dict) }}
{{- range $key, $value := .pool }}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $merged $key $value }}{{ end }}
{{- end }}
{{- $sources := list }}
{{- range $source := list "pvc" "hostPath" "image" "initContainer" }}
{{- if get ($merged.model | default dict) $source }}{{ $sources = append $sources $source }}{{ end }}
{{- end }}
{{- if gt (len $sources) 1 }}
{{- fail (printf "pool %s: model names %d sources (%s): choose one" .pool.name (len $sources) (join ", " $sources)) }}
{{- end }}
{{- if (($merged.resources).limits).cpu }}
{{- fail (printf "pool %s: resources.limits.cpu is refused, throttling between two tokens breaks TPOT: set requests.cpu instead" .pool.name) }}
{{- end }}
{{- $_ := set $merged "fullname" (include "headway.part" (dict "root" .root "part" .pool.name)) }}
{{- toYaml $merged }}
{{- end }}
