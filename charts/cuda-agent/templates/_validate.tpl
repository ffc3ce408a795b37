{{/* Combinations that no schema can refuse; each ends with a sentence for a person. */}}
{{- define "cuda-agent.validate" -}}
{{- $v := .Values -}}
{{- if not (or $v.minio.enabled $v.store.existingSecret (include "cuda-agent.store-identity" .)) -}}
{{- fail "store.existingSecret: name a secret with the keys accesskey and secretkey. Without one, install MinIO with minio.enabled=true, or give pods an identity of the cloud: store.roleArn, store.podIdentity, or on EKS eks.amazonaws.com/role-arn in access.serviceAccountAnnotations." -}}
{{- end -}}
{{- if and (or $v.store.roleArn $v.store.podIdentity) (or $v.minio.enabled $v.store.existingSecret) -}}
{{- fail "store.roleArn and store.podIdentity: with keys (store.existingSecret or minio.enabled) no identity is used; leave one of them out." -}}
{{- end -}}
{{- if and $v.minio.enabled $v.store.endpoint -}}
{{- fail "minio.enabled and store.endpoint: one store is enough; leave one of them out." -}}
{{- end -}}
{{- if and $v.minio.enabled $v.store.existingSecret -}}
{{- fail "store.existingSecret: with minio.enabled, set minio.existingSecret instead, or leave both empty for random keys." -}}
{{- end -}}
{{- if and $v.mlflow.enabled $v.tracking.uri -}}
{{- fail "mlflow.enabled and tracking.uri: one MLflow is enough; leave one of them out." -}}
{{- end -}}
{{- if and $v.minio.enabled $v.mlflow.enabled $v.mlflow.artifacts (not (regexMatch (printf "^s3://%s(/|$)" (regexQuoteMeta $v.store.bucket)) $v.mlflow.artifacts)) -}}
{{- fail (printf "mlflow.artifacts: the chart's MinIO has one bucket; choose a folder of it, as in s3://%s/mlflow." $v.store.bucket) -}}
{{- end -}}
{{- if and $v.mlflow.backendUri (not $v.mlflow.backendSecret) -}}
{{- fail "mlflow.backendUri: needs mlflow.backendSecret, a secret with the key password." -}}
{{- end -}}
{{- if and $v.mlflow.ingress.host (not $v.mlflow.ingress.tlsSecret) -}}
{{- fail "mlflow.ingress.host: needs mlflow.ingress.tlsSecret, a TLS secret for this host." -}}
{{- end -}}
{{- if contains "@" (regexReplaceAll "^[a-z0-9+]+://[^:/@]*@" $v.mlflow.backendUri "") -}}
{{- fail "mlflow.backendUri: leave the password out; it comes from mlflow.backendSecret." -}}
{{- end -}}
{{- if not $v.profiles -}}
{{- fail "profiles: at least one is needed." -}}
{{- end -}}
{{- range $name := keys $v.profiles | sortAlpha -}}
{{- $profile := include "cuda-agent.profile" (list $ $name) | fromJson -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]{0,14}[a-z0-9])?$" $name) -}}
{{- fail (printf "profiles.%s: a profile's name has at most 16 lower-case letters, digits and dashes." $name) -}}
{{- end -}}
{{- if hasPrefix "search-" $name -}}
{{- fail (printf "profiles.%s: the chart names templates of searches so; choose another name for the profile." $name) -}}
{{- end -}}
{{- if has $name (list "doctor" "gc" "gc-plan" "pin" "unpin") -}}
{{- fail (printf "profiles.%s: the chart already has a template of that name; choose another name for the profile." $name) -}}
{{- end -}}
{{- range $pool, $place := $profile.pools -}}
{{- if and (contains "gvisor" (default $v.sandbox.runtimeClassName $place.runtimeClassName)) (contains "nvidia.com/mig" ($place | toJson)) -}}
{{- fail (printf "profiles.%s.pools.%s: gVisor does not support MIG; give it whole GPUs, or another runtimeClassName." $name $pool) -}}
{{- end -}}
{{- end -}}
{{- if and $profile.queuePriority (not $profile.queue) -}}
{{- fail (printf "profiles.%s.queuePriority: only Kueue reads it; name a LocalQueue in profiles.%s.queue." $name $name) -}}
{{- end -}}
{{- range $stage, $place := $profile.stages -}}
{{- if and $place.resources (not (and $place.resources.limits $place.resources.limits.cpu $place.resources.limits.memory)) -}}
{{- fail (printf "profiles.%s.stages.%s.resources: replaces the defaults as a whole, so it needs limits for cpu and memory." $name $stage) -}}
{{- end -}}
{{- end -}}
{{- if gt (int $profile.engine.replicas) 0 -}}
{{- if not $profile.engine.claim -}}
{{- fail (printf "profiles.%s.engine.claim: weights reach the engine's replicas through a volume; name its PersistentVolumeClaim (ReadWriteMany)." $name) -}}
{{- end -}}
{{- if gt (int $profile.parallelism) 1 -}}
{{- fail (printf "profiles.%s.parallelism: a run's stages share its engine's replicas, but each stage loads different weights. Set it to 1, so that stages run one after the other." $name) -}}
{{- end -}}
{{- end -}}
{{- if and $profile.ray.enabled (gt (int $profile.parallelism) 1) -}}
{{- fail (printf "profiles.%s.parallelism: with ray.enabled, two stages of a run could each wait for the pods that the other has. Set it to 1, so that stages run one after the other." $name) -}}
{{- end -}}
{{- range $pool, $place := $profile.pools -}}
{{- if not (and $place.resources.limits.cpu $place.resources.limits.memory) -}}
{{- fail (printf "profiles.%s.pools.%s.resources.limits: untrusted code needs a limit on cpu and memory." $name $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.apiServerCidrs) -}}
{{- fail "networkPolicy.apiServerCidrs: Argo's container in each pod reports to the API server; list the server's addresses." -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.minio.enabled) (not $v.networkPolicy.storeCidrs) -}}
{{- fail "networkPolicy.storeCidrs: list the store's addresses; without them no run can read or write anything." -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.tracking.uri (not $v.networkPolicy.trackingCidrs) -}}
{{- fail "networkPolicy.trackingCidrs: list the addresses of tracking.uri; without them no metrics arrive there." -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.search.server (not $v.networkPolicy.searchEgress) -}}
{{- fail "networkPolicy.searchEgress: list the rules that lead to search.server; without them no search reaches its model." -}}
{{- end -}}
{{- if and $v.search.existingSecret (not $v.search.server) -}}
{{- fail "search.existingSecret: a key without a server; set search.server, too." -}}
{{- end -}}
{{- if and $v.cron.enabled (not $v.cron.config) -}}
{{- fail "cron.config: expected the sha256 of a configuration that an earlier run has stored; `cuda-agent config` prints it." -}}
{{- end -}}
{{- if and $v.cron.enabled (not (hasKey $v.profiles $v.cron.profile)) -}}
{{- fail (printf "cron.profile: there is no profile %s." $v.cron.profile) -}}
{{- end -}}
{{- range $name, $place := $v.secretEnvironment -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9._-]+$" $place) -}}
{{- fail (printf "secretEnvironment.%s: expected secret/key, never a value." $name) -}}
{{- end -}}
{{- end -}}
{{- include "cuda-agent.validate-secrets" . -}}
{{- end -}}

{{/* Secrets that are named are there, with their keys, or are among extraObjects under their name (an operator may make
them). A missing one would be noticed by a pod that cannot start, long after the release looked well. Without a cluster, as in
`helm template`, nothing can be looked up. */}}
{{- define "cuda-agent.validate-secrets" -}}
{{- $v := .Values -}}{{- $space := .Release.Namespace -}}
{{- if lookup "v1" "ServiceAccount" $space "default" -}}
{{- $made := list -}}
{{- range $v.extraObjects -}}{{- $made = append $made (dig "metadata" "name" "" .) -}}{{- end -}}
{{- $wanted := list
  (list "store.existingSecret" $v.store.existingSecret "accesskey" "secretkey")
  (list "minio.existingSecret" $v.minio.existingSecret "accesskey" "secretkey")
  (list "privateCa.existingSecret" $v.privateCa.existingSecret "ca.crt")
  (list "mlflow.backendSecret" $v.mlflow.backendSecret "password")
  (list "search.existingSecret" $v.search.existingSecret "key")
  (list "webhook.existingSecret" $v.webhook.existingSecret "url") -}}
{{- range $name, $place := $v.secretEnvironment -}}
{{- $parts := splitList "/" $place -}}
{{- $wanted = append $wanted (list (printf "secretEnvironment.%s" $name) (first $parts) (last $parts)) -}}
{{- end -}}
{{- range $v.images.pullSecrets -}}{{- $wanted = append $wanted (list "images.pullSecrets" .) -}}{{- end -}}
{{- range $one := $wanted -}}
{{- $value := first $one -}}{{- $name := index $one 1 -}}
{{- if and $name (not (has $name $made)) -}}
{{- $there := lookup "v1" "Secret" $space $name -}}
{{- if not $there -}}
{{- fail (printf "%s: there is no secret %s in namespace %s. Create it, then run helm again." $value $name $space) -}}
{{- end -}}
{{- range $key := slice $one 2 -}}
{{- if not (hasKey ($there.data | default dict) $key) -}}
{{- fail (printf "%s: secret %s in namespace %s has no key %s." $value $name $space $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
