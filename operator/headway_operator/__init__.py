"""Reconciles ServingSLO objects: observe, plan (headway_core.planning), apply, report.

The only package that imports kopf and kubernetes."""
