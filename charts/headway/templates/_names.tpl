{{/* Names. None is longer than 63 characters; one that must be cut ends in a digest, so that two long releases never meet. */}}

{{- define "headway.chart" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "headway.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains (include "headway.chart" .) .Release.Name }}{{ .Release.Name }}
{{- else }}{{ .Release.Name }}-{{ include "headway.chart" . }}
{{- end }}
{{- end }}

{{/* dict "root" $ "part" "gateway": <fullname>-gateway */}}
{{- define "headway.part" -}}
{{- $full := include "headway.fullname" .root }}
{{- $name := printf "%s-%s" $full .part }}
{{- if le (len $name) 63 }}{{ $name }}
{{- else }}{{ printf "%s-%s-%s" (trunc (int (sub 53 (len .part))) $full | trimSuffix "-") (sha256sum $full | trunc 8) .part }}
{{- end }}
{{- end }}

{{- define "headway.gateway" }}{{ include "headway.part" (dict "root" . "part" "gateway") }}{{ end }}
{{- define "headway.operator" }}{{ include "headway.part" (dict "root" . "part" "operator") }}{{ end }}

{{/* Cluster-scoped objects carry the namespace too: two releases of one name live in two namespaces. */}}
{{- define "headway.clusterName" }}{{ printf "headway:%s:%s" .Release.Namespace (include "headway.operator" .) }}{{ end }}

{{- define "headway.operatorAccount" -}}
{{- ((.Values.operator).serviceAccount).name | default (include "headway.operator" .) }}
{{- end }}

{{/* dict "root" $ "component" "gateway" ["pool" name]: what selects pods. It never changes between versions. */}}
{{- define "headway.selector" -}}
app.kubernetes.io/name: {{ include "headway.chart" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- if .pool }}
headway.dev/runtime: {{ .pool | quote }}
{{- end }}
{{- end }}

{{- define "headway.labels" -}}
{{- $own := include "headway.selector" . | fromYaml }}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") }}
{{- toYaml (merge $own (.root.Values.commonLabels | default dict)) }}
{{- end }}
