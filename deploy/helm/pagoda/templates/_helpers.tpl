{{- define "pagoda.name" -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- end -}}

{{- define "pagoda.labels" -}}
app.kubernetes.io/name: pagoda
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{ include "pagoda.selector" . }}
{{- end -}}

{{- define "pagoda.selector" -}}
app: {{ include "pagoda.name" .root }}
part: {{ .part }}
{{- end -}}

{{- define "pagoda.keySecret" -}}
{{- .Values.clusterKey.existingSecret | default (printf "%s-cluster-key" (include "pagoda.name" .)) -}}
{{- end -}}

{{- define "pagoda.joins" -}}
{{- $name := include "pagoda.name" . -}}
{{- $joins := list -}}
{{- range until (int .Values.router.replicas) -}}
{{- $joins = append $joins (printf "%s-router-%d.%s-routers:5600" $name . $name) -}}
{{- end -}}
{{- join "," $joins -}}
{{- end -}}

{{/* The security and placement of a pod: root, part, nodeSelector, tolerations. */}}
{{- define "pagoda.pod" -}}
enableServiceLinks: false   # variables of services may look like flags of Pagoda
automountServiceAccountToken: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  fsGroup: 1000
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "pagoda.selector" . | nindent 8 }}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "pagoda.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
{{- end -}}

{{- define "pagoda.mounts" -}}
- {name: key, mountPath: /etc/pagoda, readOnly: true}
- {name: models, mountPath: {{ .Values.models.mountPath }}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /etc/pagoda-keys, readOnly: true}
{{- end }}
{{- end -}}

{{- define "pagoda.volumes" -}}
- name: key
  secret: {secretName: {{ include "pagoda.keySecret" . }}, defaultMode: 0440}
- name: models
{{- if .Values.models.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim }}}
{{- else }}
  emptyDir: {}
{{- end }}
- name: tmp   # sockets of the server's own processes, and up to 1 GiB of files from clients
  emptyDir: {sizeLimit: 2Gi}
{{- with .Values.apiKeys.existingSecret }}
- name: api-keys
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "pagoda.serverArgs" -}}
- --host=0.0.0.0
- --cluster-key-file=/etc/pagoda/cluster.key
- --drain-timeout={{ .Values.drainSeconds }}
{{- if .Values.apiKeys.existingSecret }}
- --api-keys-file=/etc/pagoda-keys/keys
{{- end }}
{{- end -}}

{{- define "pagoda.probes" -}}
readinessProbe:
  httpGet: {path: /health/ready, port: http}
  periodSeconds: 5
  timeoutSeconds: 5   # an engine that hangs is waited for up to 2.5 s
livenessProbe:
  httpGet: {path: /health/live, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6   # a busy event loop is not to be killed
{{- end -}}
