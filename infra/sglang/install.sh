#!/usr/bin/env bash
# Install SGLang for a CPU into a virtual environment of its own: install.sh VENV [PYTHON]
#
# SGLang's own requirements name CUDA builds of torch and of several kernel packages, so it and torchvision
# are installed without their requirements, and what the CPU path imports is installed by name.  Packages
# that those bring in are held by requirements.txt (a full freeze), which also keeps torch at its CPU build:
# where that build cannot be found, the install stops instead of fetching a CUDA build of several GB.
# pip's complaints about sglang's unmet requirements are expected.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:?usage: install.sh VENV [PYTHON]}
python=${2:-python3}

torch=(torch==2.13.0)
without_requirements=(sglang==0.5.23 torchvision==0.28.0)
with_requirements=(
  aiohttp==3.14.5 anthropic==2.14.0 apache-tvm-ffi==0.1.11 blobfile==3.0.0 compressed-tensors==0.18.0
  datasets==5.2.0 distro==1.9.0 easydict==1.14 einops==0.8.2 fastapi==0.165.0 gguf==0.19.0
  interegular==0.3.3 IPython==9.18.1 kernels==0.14.1 llguidance==1.9.1 msgspec==0.23.0 ninja==1.13.2
  numba==0.65.1 numpy==2.4.6 nvidia-ml-py==13.615.71 openai==2.8.0 openai-harmony==0.0.4 orjson==3.13.0
  outlines==0.1.11 packaging==26.4 partial_json_parser==0.2.1.1.post7 pillow==13.0.0
  prometheus-client==0.26.0 psutil==7.2.2 py-spy==0.4.3 pybase64==1.5.1 pydantic==2.14.4
  python-multipart==0.0.34 pyzmq==27.3.0 regex==2026.11.19 requests==2.34.2 scipy==1.17.1
  sentencepiece==0.2.1 setproctitle==1.3.8 soundfile==0.13.1 tiktoken==0.14.0 tokenizers==0.23.2
  tqdm==4.70.1 transformers==5.19.0 uvicorn==0.54.0 uvloop==0.23.0 watchfiles==1.3.0 xgrammar==0.2.7
  xxhash==4.1.0 zstandard==0.25.0
)

stamp=$venv/.sglang-cpu-$(cat "$here/requirements.txt" "$here/install.sh" | sha256sum | cut -c1-16)
if [[ -e $stamp ]]; then
  exit 0
fi
if [[ ! -x $venv/bin/python ]]; then
  "$python" -m venv "$venv"
fi
rm -f "$venv"/.sglang-cpu-*
pip=("$venv/bin/python" -m pip install --quiet --constraint "$here/requirements.txt")
"${pip[@]}" "${torch[@]}"
"${pip[@]}" --no-deps "${without_requirements[@]}"
"${pip[@]}" "${torch[@]}" "${with_requirements[@]}"
"$venv/bin/python" -c 'import torch; assert torch.version.cuda is None, torch.__version__'
touch "$stamp"
