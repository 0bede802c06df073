{{/*
The pod of one role. Takes (dict "root" $ "role" ROLE "values" VALUES "ports" PORTS "startup" SECONDS);
"ready" is the path of the readiness probe, "model" the one of `models` that a worker serves.
*/}}
{{- define "tandem.podTemplate" -}}
{{- $root := .root -}}{{- $role := .role -}}{{- $values := .values -}}
metadata:
  labels:
    {{- include "tandem.selector" $root | nindent 4 }}
    {{- include "tandem.poolLabels" . | nindent 4 }}
  annotations:
    checksum/config: {{ include "tandem.settings" $root | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "tandem.podSecurityContext" $root | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # Not ready first, then draining, then what a process takes to let go of what it holds.
  terminationGracePeriodSeconds: {{ add (int $root.Values.gateway.lameDuckSeconds) (int $root.Values.drainSeconds) 20 }}
  containers:
    - name: {{ $role }}
      image: {{ include "tandem.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - run
        - {{ $role }}
        - --config=/etc/tandem/config/cluster.toml
        - --name=$(POD_NAME)
        - --advertise-host=$(POD_IP)
        {{- range $model := $root.Values.models }}{{ if eq $model.name ($.model | default "") }}
        - --serves={{ $model.servedName | default $model.name }}
        {{- end }}{{ end }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- include "tandem.env" $root | nindent 8 }}
        {{- if or (eq $role "prefill") (eq $role "decode") }}
        - {name: TANDEM__NETWORK__PORT, value: "50053"}
        {{- if $values.threads }}
        - {name: TANDEM__ENGINE__THREADS, value: {{ $values.threads | quote }}}
        {{- end }}
        {{- end }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := .ports }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
        - {name: admin, containerPort: 9100}
      securityContext:
        {{- include "tandem.securityContext" $root | nindent 8 }}
      # Fetching a model and loading it may take minutes.
      startupProbe:
        httpGet: {path: /startupz, port: admin}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: {{ max 1 (div (int .startup) 5) }}
      livenessProbe:
        httpGet: {path: /livez, port: admin}
        periodSeconds: 10
        timeoutSeconds: 3
        failureThreshold: 3
      readinessProbe:
        httpGet: {path: {{ .ready | default "/readyz" }}, port: admin}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 1
      lifecycle:
        preStop:
          {{- if or (eq $role "prefill") (eq $role "decode") }}
          # Takes no new work from now on; SIGTERM, which comes next, waits for what runs.
          exec: {command: [curl, --silent, --max-time, "5", --request, POST, --header, "content-type: application/json", "http://127.0.0.1:9100/drain"]}
          {{- else }}
          # SIGTERM makes the process drain; it comes once the pod has left its Service's endpoints.
          exec: {command: [sleep, "3"]}
          {{- end }}
      resources:
        {{- toYaml $values.resources | nindent 8 }}
      volumeMounts:
        {{- include "tandem.volumeMounts" $root | nindent 8 }}
        {{- if and (eq $role "gateway") $root.Values.gateway.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/tandem/api-keys, readOnly: true}
        {{- end }}
        {{- if and (eq $role "gateway") $root.Values.gateway.tls.existingSecret }}
        - {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
        {{- end }}
  volumes:
    {{- include "tandem.volumes" $root | nindent 4 }}
    {{- if and (eq $role "gateway") $root.Values.gateway.apiKeys.existingSecret }}
    - name: api-keys
      secret: {secretName: {{ $root.Values.gateway.apiKeys.existingSecret }}}
    {{- end }}
    {{- if and (eq $role "gateway") $root.Values.gateway.tls.existingSecret }}
    - name: tls
      secret: {secretName: {{ $root.Values.gateway.tls.existingSecret }}}
    {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $values.affinity }}
  affinity:
    {{- toYaml $values.affinity | nindent 4 }}
  {{- else }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "tandem.selector" $root | nindent 10 }}
          {{- include "tandem.poolLabels" . | nindent 10 }}
  {{- end }}
{{- end -}}
