{{- define "dovetail.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "dovetail.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "dovetail.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "dovetail.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* Name of an object of one component: include "dovetail.component" (list . "operator") */}}
{{- define "dovetail.component" -}}
{{- printf "%s-%s" (include "dovetail.fullname" (index . 0)) (index . 1) }}
{{- end }}

{{- define "dovetail.selector" -}}
app.kubernetes.io/name: {{ include "dovetail.name" (index . 0) }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "dovetail.labels" -}}
{{- $root := index . 0 -}}
{{ include "dovetail.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "dovetail.image" -}}
{{- $root := index . 0 -}}
{{- $image := index $root.Values.images (index . 1) -}}
{{- with $root.Values.images.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ coalesce $image.tag $root.Values.images.tag $root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "dovetail.account" -}}
{{- $account := index (index . 0).Values.serviceAccounts (index . 1) -}}
{{- if $account.create }}{{ default (include "dovetail.component" .) $account.name }}{{ else }}{{ default "default" $account.name }}{{ end }}
{{- end }}

{{- define "dovetail.sandboxTemplate" -}}
{{- with (.Values.jobs.sandboxes | default dict).podTemplate -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- define "dovetail.surplusPriorityClass" -}}
{{- $class := .Values.jobs.surplusPriorityClass -}}
{{- if $class.create }}{{ default (printf "%s-surplus" (include "dovetail.fullname" .)) $class.name }}{{ else }}{{ $class.name }}{{ end }}
{{- end }}

{{- /* "yes" if objects of a kind are wanted: include "dovetail.wants" (list . mode "group/version/Kind") */}}
{{- define "dovetail.wants" -}}
{{- if or (eq (index . 1) "Always") (and (eq (index . 1) "Auto") ((index . 0).Capabilities.APIVersions.Has (index . 2))) }}yes{{ end }}
{{- end }}

{{- /* Whether to make the policy for tenants. Auto: where one release serves all namespaces. */}}
{{- define "dovetail.tenantPolicy" -}}
{{- $tenants := .Values.tenants | default (dict "policy" "Auto") }}
{{- if or (eq $tenants.policy "Always") (and (eq $tenants.policy "Auto") (not .Values.namespaces)) }}true{{ end }}
{{- end }}

{{- /* What the pods of operator and API share: (list . component) */}}
{{- define "dovetail.podSpec" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index $root.Values $component -}}
serviceAccountName: {{ include "dovetail.account" . }}
enableServiceLinks: false
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- with int $root.Values.podUser }}
  runAsUser: {{ . }}
  runAsGroup: {{ . }}
  fsGroup: {{ . }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if $values.affinity }}
  {{- toYaml $values.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "dovetail.selector" . | nindent 14 }}
  {{- end }}
{{- end }}

{{- /* Whom jobs' pods may connect to besides each other, as JSON; empty: anybody */}}
{{- define "dovetail.jobEgress" -}}
{{- $values := .Values.networkPolicy.jobEgress -}}
{{- if $values.limited }}
{{- $rules := $values.more | default list }}
{{- if $values.dns }}
{{- $key := "kubernetes.io/metadata.name" }}
{{- $coreDNS := dict "namespaceSelector" (dict "matchLabels" (dict $key "kube-system")) "podSelector" (dict "matchLabels" (dict "k8s-app" "kube-dns")) }}
{{- $openShift := dict "namespaceSelector" (dict "matchLabels" (dict $key "openshift-dns")) }}
{{- $nodeLocal := dict "ipBlock" (dict "cidr" "169.254.20.10/32") }}
{{- $cloudDNS := dict "ipBlock" (dict "cidr" "169.254.169.254/32") }}
{{- $ports := list }}
{{- range list 53 5353 }}
{{- $ports = concat $ports (list (dict "port" . "protocol" "UDP") (dict "port" . "protocol" "TCP")) }}
{{- end }}
{{- $rules = prepend $rules (dict "to" ($values.nameServers | default (list $coreDNS $openShift $nodeLocal $cloudDNS)) "ports" $ports) }}
{{- end }}
{{- with $values.hub }}
{{- $rules = append $rules (dict "to" . "ports" (list (dict "port" 443 "protocol" "TCP"))) }}
{{- end }}
{{- with $values.storage }}
{{- $rules = append $rules (dict "to" .) }}
{{- end }}
{{- $rules | toJson }}
{{- end }}
{{- end }}

{{- define "dovetail.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Roles in each watched namespace, or one for the cluster: (list . component rules) */}}
{{- define "dovetail.roles" -}}
{{- $root := index . 0 -}}
{{- $name := include "dovetail.component" (list $root (index . 1)) -}}
{{- $rules := index . 2 -}}
{{- $labels := include "dovetail.labels" (list $root (index . 1)) -}}
{{- $subject := dict "kind" "ServiceAccount" "name" (include "dovetail.account" (list $root (index . 1))) "namespace" $root.Release.Namespace -}}
{{- $api := "rbac.authorization.k8s.io" -}}
{{- range $root.Values.namespaces }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ . }}
  labels: {{- $labels | nindent 4 }}
rules: {{- $rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ . }}
  labels: {{- $labels | nindent 4 }}
roleRef: {apiGroup: {{ $api }}, kind: Role, name: {{ $name }}}
subjects:
  - {{- toYaml $subject | nindent 4 }}
{{- else }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
rules: {{- $rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
roleRef: {apiGroup: {{ $api }}, kind: ClusterRole, name: {{ $name }}}
subjects:
  - {{- toYaml $subject | nindent 4 }}
{{- end }}
{{- end }}
