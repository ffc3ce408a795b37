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

{{/* The port that a URL names, or else that of its scheme. */}}
{{- define "cuda-agent.port-of" -}}
{{- $url := urlParse . -}}
{{- regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}

{{/* The identity of the cloud with which pods use the store, without keys: roleArn, podIdentity, annotation (of EKS) or nothing. */}}
{{- define "cuda-agent.store-identity" -}}
{{- if or .Values.minio.enabled .Values.store.existingSecret -}}
{{- else if .Values.store.roleArn -}}roleArn
{{- else if .Values.store.podIdentity -}}podIdentity
{{- else if index .Values.access.serviceAccountAnnotations "eks.amazonaws.com/role-arn" -}}annotation
{{- end -}}
{{- end -}}

{{/* A profile's values, with those of its base: call with a list of root and profile name. */}}
{{- define "cuda-agent.profile" -}}
{{- $profiles := (index . 0).Values.profiles -}}{{- $name := index . 1 -}}
{{- $own := get $profiles $name -}}
{{- $base := dig "base" "cpu" $own -}}
{{- if $base -}}
{{- if not (hasKey $profiles $base) -}}
{{- fail (printf "profiles.%s.base: there is no profile %s." $name $base) -}}
{{- end -}}
{{- if dig "base" "cpu" (get $profiles $base) -}}
{{- fail (printf "profiles.%s.base: profile %s has a base itself; name one without." $name $base) -}}
{{- end -}}
{{- mergeOverwrite (get $profiles $base | deepCopy) (deepCopy $own) | toJson -}}
{{- else -}}
{{- $own | toJson -}}
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

{{/* How a container reaches the store's server: its region, keys or role, and endpoint, as variables that AWS's libraries
read. A JSON list. */}}
{{- define "cuda-agent.store-environment" -}}
{{- $secret := include "cuda-agent.store-secret" . -}}
{{- $environment := list (dict "name" "AWS_REGION" "value" .Values.store.region) -}}
{{- if not (include "cuda-agent.store-identity" .) -}}
{{- $environment = concat $environment (list
  (dict "name" "AWS_ACCESS_KEY_ID" "valueFrom" (dict "secretKeyRef" (dict "name" $secret "key" "accesskey")))
  (dict "name" "AWS_SECRET_ACCESS_KEY" "valueFrom" (dict "secretKeyRef" (dict "name" $secret "key" "secretkey")))) -}}
{{- end -}}
{{- $environment = concat $environment (include "cuda-agent.role-environment" . | fromJsonArray) -}}
{{- with include "cuda-agent.store-endpoint" . -}}
{{- $environment = append $environment (dict "name" "AWS_ENDPOINT_URL" "value" .) -}}
{{- end -}}
{{- $environment | toJson -}}
{{- end -}}

{{/* Environment of every pod of ours: the store, MLflow, and what the values add. A JSON list. */}}
{{- define "cuda-agent.environment" -}}
{{- $prefix := .Values.store.prefix | trimAll "/" -}}
{{- $uri := printf "s3://%s%s" .Values.store.bucket (ternary "" (printf "/%s" $prefix) (empty $prefix)) -}}
{{- $environment := concat (include "cuda-agent.store-environment" . | fromJsonArray) (list
  (dict "name" "CUDA_AGENT_STORE" "value" $uri)
  (dict "name" "CUDA_AGENT_RELEASE" "value" (printf "%s/%s" .Release.Namespace (include "cuda-agent.fullname" .)))
  (dict "name" "CUDA_AGENT_MLFLOW" "value" (include "cuda-agent.tracking-uri" .))) -}}
{{- if not .Values.networkPolicy.enabled -}}
{{- $environment = append $environment (dict "name" "CUDA_AGENT_OPEN_EGRESS" "value" "yes") -}}
{{- end -}}
{{- if .Values.privateCa.existingSecret -}}
{{- $environment = append $environment (dict "name" "CUDA_AGENT_CA_FILE" "value" "/etc/cuda-agent/ca/ca.crt") -}}
{{- end -}}
{{- range $key, $value := .Values.environment -}}
{{- $environment = append $environment (dict "name" $key "value" $value) -}}
{{- end -}}
{{- range $key, $place := .Values.secretEnvironment -}}
{{- $parts := splitList "/" $place -}}
{{- $environment = append $environment (dict "name" $key "valueFrom" (dict "secretKeyRef" (dict "name" (first $parts) "key" (last $parts)))) -}}
{{- end -}}
{{- $environment | toJson -}}
{{- end -}}

{{/* What a container needs to take the role store.roleArn, also Argo's own: JSON lists of variables and of mounts. */}}
{{- define "cuda-agent.role-environment" -}}
{{- if eq (include "cuda-agent.store-identity" .) "roleArn" -}}
{{- list (dict "name" "AWS_ROLE_ARN" "value" .Values.store.roleArn)
  (dict "name" "AWS_WEB_IDENTITY_TOKEN_FILE" "value" "/var/run/secrets/store/token") | toJson -}}
{{- else -}}[]{{- end -}}
{{- end -}}
{{- define "cuda-agent.role-mounts" -}}
{{- if eq (include "cuda-agent.store-identity" .) "roleArn" -}}
{{- list (dict "name" "store-token" "mountPath" "/var/run/secrets/store" "readOnly" true) | toJson -}}
{{- else -}}[]{{- end -}}
{{- end -}}

{{/* Volumes of every pod of ours and their mounts: JSON lists. */}}
{{- define "cuda-agent.volumes" -}}
{{- $volumes := .Values.extraVolumes -}}
{{- if eq (include "cuda-agent.store-identity" .) "roleArn" -}}
{{- $token := dict "serviceAccountToken" (dict "path" "token" "audience" .Values.store.tokenAudience "expirationSeconds" 3600) -}}
{{- $volumes = append $volumes (dict "name" "store-token" "projected" (dict "sources" (list $token))) -}}
{{- end -}}
{{- with .Values.privateCa.existingSecret -}}
{{- $volumes = append $volumes (dict "name" "private-ca" "secret" (dict "secretName" .)) -}}
{{- end -}}
{{- $volumes | toJson -}}
{{- end -}}
{{- define "cuda-agent.mounts" -}}
{{- $mounts := concat .Values.extraVolumeMounts (include "cuda-agent.role-mounts" . | fromJsonArray) -}}
{{- if .Values.privateCa.existingSecret -}}
{{- $mounts = append $mounts (dict "name" "private-ca" "mountPath" "/etc/cuda-agent/ca" "readOnly" true) -}}
{{- end -}}
{{- $mounts | toJson -}}
{{- end -}}

{{/* Puts the place of a pod into its spec: call with a list of root, the spec, and the values that name the place. Where
these are empty, the release's own values count. */}}
{{- define "cuda-agent.place" -}}
{{- $root := index . 0 -}}{{- $pod := index . 1 -}}{{- $place := index . 2 -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "runtimeClassName" -}}
{{- with get $place $key | default (get $root.Values $key) -}}{{- $_ := set $pod $key . -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* A container's resources, and what its pod needs for its GPUs, as JSON. With gpu.allocation=dra, a claim takes the
place of nvidia.com/gpu: gpu.sharedClaim, if there is one and the pod may share it, else a claim of the pod alone. */}}
{{- define "cuda-agent.gpus" -}}
{{- $root := index . 0 -}}{{- $resources := deepCopy (index . 1) -}}{{- $mayShare := index . 2 -}}
{{- $gpu := $root.Values.gpu -}}
{{- $pod := dict -}}
{{- $count := int (get ($resources.limits | default dict) "nvidia.com/gpu" | default 0) -}}
{{- if and $count (eq $gpu.allocation "dra") -}}
{{- range $part := values $resources -}}{{- $_ := unset $part "nvidia.com/gpu" -}}{{- end -}}
{{- $_ := set $resources "claims" (list (dict "name" "gpus")) -}}
{{- $claim := dict "name" "gpus" "resourceClaimTemplateName" (printf "%s-gpus-%d" (include "cuda-agent.fullname" $root) $count) -}}
{{- if and $mayShare $gpu.sharedClaim -}}{{- $claim = dict "name" "gpus" "resourceClaimName" $gpu.sharedClaim -}}{{- end -}}
{{- $_ := set $pod "resourceClaims" (list $claim) -}}
{{- end -}}
{{- dict "resources" $resources "pod" $pod | toJson -}}
{{- end -}}

{{/* How many GPUs a container's resources name; a MIG device counts as one. */}}
{{- define "cuda-agent.gpu-count" -}}
{{- $count := 0 -}}
{{- range $resource, $number := .limits -}}
{{- if hasPrefix "nvidia.com/" $resource -}}{{- $count = add $count (int $number) -}}{{- end -}}
{{- end -}}
{{- $count -}}
{{- end -}}

{{/* Labels by which Kueue knows the queue and the priority of a profile's pods, as JSON. */}}
{{- define "cuda-agent.queue-labels" -}}
{{- $labels := dict -}}
{{- with .queue -}}{{- $_ := set $labels "kueue.x-k8s.io/queue-name" . -}}{{- end -}}
{{- with .queuePriority -}}{{- $_ := set $labels "kueue.x-k8s.io/priority-class" . -}}{{- end -}}
{{- $labels | toJson -}}
{{- end -}}

{{/* What a container of ours may do, as JSON. */}}
{{- define "cuda-agent.container-security" -}}
{{- dict "runAsNonRoot" true "readOnlyRootFilesystem" true "allowPrivilegeEscalation" false
  "capabilities" (dict "drop" (list "ALL")) "seccompProfile" (dict "type" "RuntimeDefault") | toJson -}}
{{- end -}}
