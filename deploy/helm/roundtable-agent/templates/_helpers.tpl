{{- define "agent.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "agent.labels" -}}
{{ include "agent.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{/* Asks from inside: the page is on the pod's own loopback unless Prometheus reads it. */}}
{{- define "agent.probe" -}}
["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9465/{{ . }}', timeout=4)"]
{{- end }}
{{/* By its digest, which nobody can give to another image; else by its tag. */}}
{{- define "agent.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}
{{- else }}:{{ default (printf "%s-cuda" .Chart.AppVersion) .Values.image.tag }}{{ end }}
{{- end }}
