{{- define "modelserver.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "modelserver.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "modelserver.labels" -}}
{{ include "modelserver.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "modelserver.image" -}}
{{- $flavour := ternary "cuda" "cpu" .Values.gpu.enabled -}}
{{- if .Values.image.digest -}}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}{{ .Values.image.repository }}:{{ default (printf "%s-%s" .Chart.AppVersion $flavour) .Values.image.tag }}{{- end -}}
{{- end -}}

{{- define "modelserver.serviceAccount" -}}
{{- default (include "modelserver.name" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "modelserver.claim" -}}
{{- default (printf "%s-models" (include "modelserver.name" .)) .Values.model.pvc.claim -}}
{{- end -}}

{{/* The options file, with what the chart knows and then what the values say. */}}
{{- define "modelserver.options" -}}
{{- $known := dict "http-address" "0.0.0.0" "grpc-address" "0.0.0.0" "metrics-address" "0.0.0.0" -}}
{{- $_ := set $known "http-port" (int .Values.ports.http) -}}
{{- $_ := set $known "grpc-port" (int .Values.ports.grpc) -}}
{{- $_ := set $known "metrics-port" (int .Values.ports.metrics) -}}
{{- $_ := set $known "drain-delay-secs" (int .Values.shutdown.drainDelay) -}}
{{- $_ := set $known "exit-timeout-secs" (int .Values.shutdown.exitTimeout) -}}
{{- $_ := set $known "model-control-mode" .Values.model.controlMode -}}
{{- $_ := set $known "model-repository" (list (ternary .Values.model.s3.uri "/models" (eq .Values.model.source "s3"))) -}}
{{- $_ := set $known "exit-on-error" false -}}
{{- $_ := set $known "log-format" "json" -}}
{{- if .Values.model.load }}{{ $_ := set $known "load-model" .Values.model.load }}{{ end -}}
{{- if .Values.tls.secret -}}
{{- $_ := set $known "tls-cert" "/tls/tls.crt" -}}
{{- $_ := set $known "tls-key" "/tls/tls.key" -}}
{{- if .Values.tls.clientCa }}{{ $_ := set $known "tls-client-ca" "/tls/ca.crt" }}{{ end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $known (deepCopy .Values.options)) -}}
{{- end -}}

{{/* A probe of a path. Where clients need certificates kubelet has none, and only opens the port. */}}
{{- define "modelserver.probe" -}}
{{- if and .root.Values.tls.secret .root.Values.tls.clientCa -}}
tcpSocket: {port: http}
{{- else -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ ternary "HTTPS" "HTTP" (ne .root.Values.tls.secret "") }}}
{{- end -}}
{{- end -}}
