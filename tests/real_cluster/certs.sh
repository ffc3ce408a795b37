#!/usr/bin/env bash
# certs.sh: one certificate authority, an identity for every component, and a kubeconfig for each that wants one.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
umask 077
mkdir -p "$PKI" "$STATE/users"
cd "$PKI"

key() { openssl ecparam -genkey -name prime256v1 -noout -out "$1.key"; }
authority() {
  key "$1"
  openssl req -x509 -new -key "$1.key" -sha256 -days 365 -subj "/CN=$1" -out "$1.crt" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature
}
identity() { # name subject clientAuth|serverAuth [alternative names]
  key "$1"
  openssl req -new -key "$1.key" -subj "$2" -out "$1.csr"
  printf '%s\n' basicConstraints=CA:FALSE keyUsage=digitalSignature "extendedKeyUsage=$3" \
    ${4:+"subjectAltName=$4"} >"$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -sha256 -days 365 -extfile "$1.ext" \
    -out "$1.crt" 2>/dev/null
  rm "$1.csr" "$1.ext"
}
kubeconfig() { # name file
  cat >"$2" <<Y
apiVersion: v1
kind: Config
clusters: [{name: cuda-agent-test, cluster: {server: "$SERVER", certificate-authority-data: $(base64 -w0 <ca.crt)}}]
users: [{name: $1, user: {client-certificate-data: $(base64 -w0 <"$1.crt"), client-key-data: $(base64 -w0 <"$1.key")}}]
contexts: [{name: cuda-agent-test, context: {cluster: cuda-agent-test, user: $1}}]
current-context: cuda-agent-test
Y
}

authority ca
authority front-ca # for request headers alone; shared with ca, every client certificate could name any user
identity apiserver /CN=kube-apiserver serverAuth "IP:$NODE_IP,IP:$API_IP,DNS:kubernetes,DNS:kubernetes.default,\
DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
identity kubelet-serving "/O=system:nodes/CN=system:node:$NODE" serverAuth "IP:$NODE_IP,DNS:$NODE"
identity apiserver-kubelet /O=system:masters/CN=apiserver-kubelet clientAuth
identity admin /O=system:masters/CN=admin clientAuth
identity kubelet "/O=system:nodes/CN=system:node:$NODE" clientAuth
for name in controller-manager scheduler; do identity $name /CN=system:kube-$name clientAuth; done
identity proxy /CN=system:kube-proxy clientAuth
for name in netpol volumes; do identity $name /CN=$name clientAuth; done # their rights are in manifests/rbac.yaml
openssl genrsa -out service-accounts.key 2048 2>/dev/null
openssl rsa -in service-accounts.key -pubout -out service-accounts.pub 2>/dev/null
for name in kubelet controller-manager scheduler proxy; do kubeconfig $name "$STATE/users/$name"; done
kubeconfig admin "$STATE/kubeconfig"
