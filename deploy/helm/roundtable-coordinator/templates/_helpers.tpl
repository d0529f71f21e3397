{{- define "coordinator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "coordinator.labels" -}}
{{ include "coordinator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "coordinator.doorHosts" -}}
{{- range $door, $values := dict "operators" .Values.operators "enrolment" .Values.enrolment -}}
{{- if and $values.enabled $.Values.ingress.enabled -}}
{{- if ne (len $values.hosts) (len $.Values.hosts) -}}
{{- fail (printf "%s.hosts: with the ingress it needs as many names as hosts has, since names are all that an ingress tells doors apart by" $door) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
{{/* Where operators connect: through an ingress by name, else by port. */}}
{{- define "coordinator.operatorsAddress" -}}
{{- if not .Values.operators.enabled }}{{ first .Values.hosts }}:{{ .Values.port }}
{{- else if .Values.ingress.enabled }}{{ first .Values.operators.hosts }}:{{ .Values.port }}
{{- else }}{{ first .Values.hosts }}:7445{{ end }}
{{- end }}
{{/* Asks from inside: the page is on the pod's own loopback unless Prometheus reads it. */}}
{{- define "coordinator.probe" -}}
["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/{{ . }}', timeout=4)"]
{{- end }}
{{/* By its digest, which nobody can give to another image; else by its tag. */}}
{{- define "coordinator.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}
{{- else }}:{{ default (printf "%s" .Chart.AppVersion) .Values.image.tag }}{{ end }}
{{- end }}
