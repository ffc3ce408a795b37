{{- define "cuda-agent.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The release's name in the names of its objects; short enough for what is appended. */}}
{{- define "cuda-agent.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else if contains (include "cuda-agent.name" .) .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "cuda-agent.name" .) | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* A profile's WorkflowTemplate: call with a list of root and profile name. */}}
{{- define "cuda-agent.template-name" -}}
{{- $root := index . 0 -}}
{{- printf "%s-%s-%s" (include "cuda-agent.fullname" $root) (index . 1) ($root.Chart.Version | replace "." "-" | replace "+" "-") -}}
{{- end -}}

{{- define "cuda-agent.selector" -}}
app.kubernetes.io/name: {{ include "cuda-agent.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "cuda-agent.labels" -}}
{{ include "cuda-agent.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of a server's pods: without versions, so that an upgrade that leaves its image alone leaves the server alone. */}}
{{- define "cuda-agent.pod-labels" -}}
{{ include "cuda-agent.selector" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An image's reference: call with a list of root and the image's values. */}}
{{- define "cuda-agent.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{- $name := ternary $image.repository (printf "%s/%s" $root.Values.images.registry $image.repository) (empty $root.Values.images.registry) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "cuda-agent.store-endpoint" -}}
{{- if .Values.store.endpoint -}}
{{- .Values.store.endpoint | trimSuffix "/" -}}
{{- else if .Values.minio.enabled -}}
{{- printf "http://%s-minio:9000" (include "cuda-agent.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* The annotation of EKS by which a pod's service account takes an IAM role: pods then need no keys for the store. */}}
{{- define "cuda-agent.store-by-role" -}}
{{- if not (or .Values.minio.enabled .Values.store.existingSecret) -}}
{{- index .Values.access.serviceAccountAnnotations "eks.amazonaws.com/role-arn" | default "" -}}
{{- end -}}
{{- end -}}

{{- define "cuda-agent.store-secret" -}}
{{- if .Values.store.existingSecret -}}
{{- .Values.store.existingSecret -}}
{{- else if .Values.minio.existingSecret -}}
{{- .Values.minio.existingSecret -}}
{{- else -}}
{{- printf "%s-minio" (include "cuda-agent.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "cuda-agent.tracking-uri" -}}
{{- if .Values.tracking.uri -}}
{{- .Values.tracking.uri | trimSuffix "/" -}}
{{- else if .Values.mlflow.enabled -}}
{{- printf "http://%s-mlflow:5000" (include "cuda-agent.fullname" .) -}}
{{- else -}}
off
{{- end -}}
{{- end -}}

{{/* Environment that every pod of ours needs for the store, as JSON. */}}
{{- define "cuda-agent.store-environment" -}}
{{- $secret := include "cuda-agent.store-secret" . -}}
{{- $prefix := .Values.store.prefix | trimAll "/" -}}
{{- $uri := printf "s3://%s%s" .Values.store.bucket (ternary "" (printf "/%s" $prefix) (empty $prefix)) -}}
{{- $environment := list
  (dict "name" "CUDA_AGENT_STORE" "value" $uri)
  (dict "name" "CUDA_AGENT_MLFLOW" "value" (include "cuda-agent.tracking-uri" .))
  (dict "name" "AWS_REGION" "value" .Values.store.region) -}}
{{- if not (include "cuda-agent.store-by-role" .) -}}
{{- $environment = concat $environment (list
  (dict "name" "AWS_ACCESS_KEY_ID" "valueFrom" (dict "secretKeyRef" (dict "name" $secret "key" "accesskey")))
  (dict "name" "AWS_SECRET_ACCESS_KEY" "valueFrom" (dict "secretKeyRef" (dict "name" $secret "key" "secretkey")))) -}}
{{- end -}}
{{- with include "cuda-agent.store-endpoint" . -}}
{{- $environment = append $environment (dict "name" "AWS_ENDPOINT_URL" "value" .) -}}
{{- end -}}
{{- $environment | toJson -}}
{{- end -}}

{{/* What a container of ours may do, as JSON. */}}
{{- define "cuda-agent.container-security" -}}
{{- dict "runAsNonRoot" true "readOnlyRootFilesystem" true "allowPrivilegeEscalation" false
  "capabilities" (dict "drop" (list "ALL")) "seccompProfile" (dict "type" "RuntimeDefault") | toJson -}}
{{- end -}}
