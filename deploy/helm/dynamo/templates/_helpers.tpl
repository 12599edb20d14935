{{- define "dynamo.fullname" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* The Deployment of a pool. Takes (list context pool). */}}
{{- define "dynamo.workerName" -}}
{{- $pool := index . 1 }}
{{- if not (hasKey (index . 0).Values.pools $pool) }}
{{- fail (printf "planner.deployments names the pool %s, which is not in pools" $pool) }}
{{- end }}
{{- include "dynamo.fullname" (index . 0) }}-worker{{ if ne $pool "default" }}-{{ $pool }}{{ end }}
{{- end }}

{{/* What selects pods. Takes (list context component). */}}
{{- define "dynamo.selector" -}}
app.kubernetes.io/name: dynamo-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end }}

{{- define "dynamo.labels" -}}
{{ include "dynamo.selector" . }}
app.kubernetes.io/part-of: dynamo
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{/* Of ours; etcd and NATS come from elsewhere. Takes (list context name). */}}
{{- define "dynamo.image" -}}
{{ (index . 0).Values.images.registry }}{{ index . 1 }}
{{- end }}

{{/* What all processes share. */}}
{{- define "dynamo.config" -}}
DYN_NAMESPACE: {{ .Values.namespace | quote }}
{{- if .Values.etcd.enabled }}
DYN_ETCD_ENDPOINTS: http://{{ include "dynamo.fullname" . }}-etcd:2379
{{- else }}
DYN_ETCD_ENDPOINTS: {{ join "," .Values.etcd.endpoints | quote }}
{{- end }}
{{- if .Values.nats.enabled }}
DYN_NATS_SERVERS: nats://{{ include "dynamo.fullname" . }}-nats:4222
{{- else }}
DYN_NATS_SERVERS: {{ join "," .Values.nats.servers | quote }}
{{- end }}
DYN_LOG: {{ .Values.log.level | quote }}
DYN_LOG_FORMAT: {{ .Values.log.format | quote }}
{{- if .Values.sharedMemory.enabled }}
DYN_SHARED_MEMORY_DIR: /var/run/dynamo-shared-memory
DYN_SHARED_MEMORY_SIZE: {{ .Values.sharedMemory.size }}B
{{- end }}
{{- with .Values.tracing.endpoint }}
DYN_OTLP_ENDPOINT: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The kubelet makes the folder of the node as root, and fsGroup does not apply to it. Takes (list context image). */}}
{{- define "dynamo.sharedMemory" -}}
- name: shared-memory
  image: {{ include "dynamo.image" . }}
  imagePullPolicy: {{ (index . 0).Values.images.pullPolicy }}
  command: [python, -c, "import os; os.chmod('/shared-memory', 0o700); os.chown('/shared-memory', 65532, 65532)"]
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 64Mi}
  securityContext:
    runAsNonRoot: false
    runAsUser: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
      add: [CHOWN, FOWNER]
  volumeMounts:
    - {name: shared-memory, mountPath: /shared-memory}
{{- end }}

{{- define "dynamo.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "dynamo.pullSecrets" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "dynamo.etcdMembers" -}}
{{- $name := printf "%s-etcd" (include "dynamo.fullname" .) }}
{{- $members := list }}
{{- range $index := until (int .Values.etcd.replicas) }}
{{- $members = append $members (printf "%s-%d=http://%s-%d.%s-headless:2380" $name $index $name $index $name) }}
{{- end }}
{{- join "," $members }}
{{- end }}
