{{- define "tandem.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "tandem" $name) }}{{ $name = printf "%s-tandem" $name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{ include "tandem.selector" . }}
{{- end -}}

{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tandem.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "tandem.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* host:port of each scheduler pod, by its stable name. */}}
{{- define "tandem.schedulers" -}}
{{- $name := printf "%s-scheduler" (include "tandem.fullname" .) -}}
{{- $all := list -}}
{{- range $i := until (int .Values.scheduler.replicas) -}}
{{- $all = append $all (printf "%s-%d.%s.%s.svc:50052" $name $i $name $.Release.Namespace) -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/*
The pools of workers, each as a dict: "role", "name" (what its objects are called by, behind the release's),
"model" (its name in `models`; empty: the only one) and "values".
*/}}
{{- define "tandem.pools" -}}
{{- if and .Values.models (or (ne .Values.model "smollm2-135m-instruct") .Values.servedName) -}}
{{- fail "models: each has its own model and servedName; those of the whole chart cannot be set beside them" -}}
{{- end -}}
{{- $all := list -}}
{{- $names := list -}}
{{- range $role := list "prefill" "decode" -}}
{{- $common := index $.Values $role -}}
{{- if not $.Values.models -}}
{{- $all = append $all (dict "role" $role "name" $role "model" "" "values" $common) -}}
{{- end -}}
{{- range $model := $.Values.models -}}
{{- $values := mergeOverwrite (deepCopy $common) (deepCopy (get $model $role | default dict)) -}}
{{- if and (eq $role "decode") (lt (int $values.replicas) 1) -}}
{{- fail (printf "models: %s has no decode workers; decode.replicas is at least 1" $model.name) -}}
{{- end -}}
{{- $name := printf "%s-%s" $model.name $role -}}
{{- if has $name $names -}}{{- fail (printf "models: two are named %s" $model.name) -}}{{- end -}}
{{- $names = append $names $name -}}
{{- $all = append $all (dict "role" $role "name" $name "model" $model.name "values" $values) -}}
{{- end -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* Labels of one pool's pods, beside those of the release. Takes (dict "role" ROLE "model" NAME). */}}
{{- define "tandem.poolLabels" -}}
app.kubernetes.io/component: {{ .role }}
{{- if .model }}
tandem/model: {{ .model }}
{{- end }}
{{- end -}}

{{/* [[models]] of the settings: what each has of its own. */}}
{{- define "tandem.models" -}}
{{- range $model := .Values.models }}
[[models]]
model = {{ toJson $model.model }}
served_name = {{ toJson ($model.servedName | default $model.name) }}
{{- with $model.aliases }}
aliases = {{ toJson . }}
{{- end }}
{{- range $pool := fromJsonArray (include "tandem.pools" $) }}{{ if eq $pool.model $model.name }}
{{ $pool.role }}_workers = {{ int $pool.values.replicas }}
{{- end }}{{ end }}
{{- range $key, $value := $model.settings }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{ end }}
{{- end -}}

{{/* What the chart decides of the settings, over what `settings` says. */}}
{{- define "tandem.settings" -}}
{{- $gateway := dict
  "host" "0.0.0.0"
  "http_port" 8000
  "grpc_port" 50051
  "lame_duck_s" (float64 .Values.gateway.lameDuckSeconds)
-}}
{{- if .Values.gateway.apiKeys.existingSecret -}}
{{- $_ := set $gateway "api_keys_file" "/etc/tandem/api-keys/keys.toml" -}}
{{- else if .Values.gateway.insecure -}}
{{- $_ := set $gateway "insecure" true -}}
{{- else -}}
{{- fail "gateway.apiKeys.existingSecret is empty: name a Secret with the key keys.toml, or set gateway.insecure to serve everybody who reaches the gateway" -}}
{{- end -}}
{{- if .Values.gateway.tls.existingSecret -}}
{{- $_ := set $gateway "tls_cert_file" "/etc/tandem/tls/tls.crt" -}}
{{- $_ := set $gateway "tls_key_file" "/etc/tandem/tls/tls.key" -}}
{{- end -}}
{{- if and (gt (int .Values.scheduler.replicas) 1) (not .Values.redis.enabled) -}}
{{- fail (printf "scheduler.replicas is %d: standby schedulers need redis.enabled" (int .Values.scheduler.replicas)) -}}
{{- end -}}
{{- $telemetry := dict "admin_host" "0.0.0.0" "admin_port" 9100 -}}
{{- with .Values.telemetry.otlpEndpoint -}}
{{- $_ := set $telemetry "otlp_endpoint" . -}}
{{- end -}}
{{- $network := dict "schedulers" (fromJsonArray (include "tandem.schedulers" .)) -}}
{{- if .Values.ray.enabled -}}{{- $network = dict -}}{{- end -}}
{{- $own := dict
  "secret_file" "/etc/tandem/secret/secret"
  "drain_timeout_s" (float64 .Values.drainSeconds)
  "gateway" $gateway
  "scheduler" (dict "admin_host" "0.0.0.0" "admin_port" 9100)
  "telemetry" $telemetry
-}}
{{- if not .Values.models -}}
{{- $_ := set $own "model" .Values.model -}}
{{- if .Values.servedName -}}{{- $_ := set $own "served_name" .Values.servedName -}}{{- end -}}
{{- range $pool := fromJsonArray (include "tandem.pools" .) -}}
{{- $_ := set $own (printf "%s_workers" $pool.role) (int $pool.values.replicas) -}}
{{- end -}}
{{- end -}}
{{- if .Values.internalTls.existingSecret -}}
{{- $_ := set $own "internal_tls" (dict
  "cert_file" "/etc/tandem/internal-tls/tls.crt"
  "key_file" "/etc/tandem/internal-tls/tls.key"
  "ca_file" "/etc/tandem/internal-tls/ca.crt"
) -}}
{{- end -}}
{{- if $network -}}{{- $_ := set $own "network" $network -}}{{- end -}}
{{- range $key, $value := $own -}}
{{- if kindIs "map" $value -}}
{{- range $name, $_ := $value -}}
{{- if hasKey (get $.Values.settings $key | default dict) $name -}}
{{- fail (printf "settings.%s.%s is what the chart sets itself, from other values" $key $name) -}}
{{- end -}}
{{- end -}}
{{- else if hasKey $.Values.settings $key -}}
{{- fail (printf "settings.%s is what the chart sets itself, from other values" $key) -}}
{{- end -}}
{{- end -}}
{{- if hasKey .Values.settings "models" -}}
{{- fail "settings.models is what the chart sets itself, from models" -}}
{{- end -}}
{{- $all := mergeOverwrite (deepCopy .Values.settings) $own -}}
{{- range $key, $value := $all }}{{ if not (kindIs "map" $value) -}}
{{ $key }} = {{ toJson $value }}
{{ end }}{{ end }}{{- range $section, $values := $all }}{{ if kindIs "map" $values }}
[{{ $section }}]
{{ range $key, $value := $values -}}
{{ $key }} = {{ toJson $value }}
{{ end }}{{ end }}{{ end }}
{{- include "tandem.models" . }}
{{- end -}}

{{- define "tandem.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "tandem.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsUser }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Settings, secrets and the folders that are written to. */}}
{{- define "tandem.volumes" -}}
- name: config
  configMap: {name: {{ include "tandem.fullname" . }}}
- name: secret
  secret:
    secretName: {{ .Values.secret.existingSecret }}
    items: [{key: secret, path: secret}]
{{- if .Values.internalTls.existingSecret }}
- name: internal-tls
  secret: {secretName: {{ .Values.internalTls.existingSecret }}}
{{- end }}
- name: run
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: models
{{- if .Values.modelVolume.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.modelVolume.existingClaim }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.modelVolume.sizeLimit }}}
{{- end }}
{{- end -}}

{{- define "tandem.volumeMounts" -}}
- {name: config, mountPath: /etc/tandem/config, readOnly: true}
- {name: secret, mountPath: /etc/tandem/secret, readOnly: true}
{{- if .Values.internalTls.existingSecret }}
- {name: internal-tls, mountPath: /etc/tandem/internal-tls, readOnly: true}
{{- end }}
- {name: run, mountPath: /run/tandem}
- {name: tmp, mountPath: /tmp}
- {name: models, mountPath: /models}
{{- end -}}

{{- define "tandem.env" -}}
- {name: XDG_RUNTIME_DIR, value: /run/tandem}
- {name: HOME, value: /tmp}
- {name: TANDEM_CACHE, value: /models/tandem}
- {name: HF_HOME, value: /models/huggingface}
{{- if .Values.hubToken.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.hubToken.existingSecret }}, key: token}}
{{- end }}
{{- if .Values.redis.enabled }}
- name: TANDEM_REDIS_URL
{{- if .Values.redis.existingSecret }}
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: url}}
{{- else }}
  value: redis://{{ include "tandem.fullname" . }}-redis:6379/0
{{- end }}
{{- end }}
{{- end -}}
