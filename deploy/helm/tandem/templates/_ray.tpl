{{- define "tandem.rayCluster" -}}
rayVersion: {{ .Values.ray.rayVersion | quote }}
headGroupSpec:
  rayStartParams:
    dashboard-host: 0.0.0.0
    # The head holds the cluster together; work goes to the groups below.
    num-cpus: "0"
  template:
    {{- include "tandem.rayPod" (dict "root" . "name" "ray-head" "values" .Values.ray.head "ports" (dict "gcs" 6379 "dashboard" 8265 "client" 10001)) | nindent 4 }}
workerGroupSpecs:
  {{- range .Values.ray.workerGroups }}
  - groupName: {{ .name }}
    replicas: {{ .replicas }}
    minReplicas: {{ .minReplicas }}
    maxReplicas: {{ .maxReplicas }}
    rayStartParams: {}
    template:
      {{- include "tandem.rayPod" (dict "root" $ "name" "ray-worker" "values" . "ports" dict) | nindent 6 }}
  {{- end }}
{{- end -}}

{{- define "tandem.rayPod" -}}
metadata:
  labels:
    {{- include "tandem.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  automountServiceAccountToken: false
  securityContext:
    {{- include "tandem.podSecurityContext" .root | nindent 4 }}
  containers:
    - name: {{ .name }}
      image: {{ include "tandem.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      env:
        {{- include "tandem.env" .root | nindent 8 }}
      {{- with .ports }}
      ports:
        {{- range $name, $port := . }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        runAsNonRoot: true
        capabilities: {drop: [ALL]}
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      volumeMounts:
        {{- include "tandem.volumeMounts" .root | nindent 8 }}
  volumes:
    {{- include "tandem.volumes" .root | nindent 4 }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
