#!/usr/bin/env bash
# Start the server: serve.sh VENV MODEL PORT [extra server arguments]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$1 model=$2 port=$3
shift 3
export PYTHONPATH=$here/shim OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
exec "$venv/bin/python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" \
  --device cpu --attention-backend torch_native --sampling-backend pytorch \
  --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled \
  --max-total-tokens 65536 --max-running-requests 64 --dtype float32 "$@"
