# Penstock's image, for CPUs:  docker build --tag penstock .
# For GPUs, with the build of PyTorch for CUDA 13.0:  docker build --tag penstock --build-arg TORCH=cu130 .
# The demo in it:  docker run --rm penstock
# The same, leaving its run and its picture in runs/demo:
#   mkdir -m 777 runs && docker run --rm --volume "$PWD/runs:/penstock/runs" penstock
FROM python:3.12-slim
ARG TORCH=cpu
WORKDIR /penstock
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install --no-cache-dir --constraint constraints.txt --index-url https://download.pytorch.org/whl/$TORCH torch
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt '.[all]'
COPY examples examples
COPY tools tools
# Kubeflow's runtimes may demand a user other than root, who needs a place for runs and for what is tokenized.
RUN mkdir runs && chown 1000 runs
ENV HOME=/tmp
USER 1000
CMD ["python", "tools/demo.py"]
