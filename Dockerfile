# syntax=docker/dockerfile:1
# CPU:  docker build --target cpu -t gspo:cpu .     docker run --rm -it -v "$PWD:/work" gspo:cpu train quickstart
# CUDA: docker build --target cuda -t gspo:cuda .   docker run --rm -it --gpus all -v "$PWD:/work" gspo:cuda train run.yaml
# The user of both images has the uid 1000. If a mounted folder belongs to another uid, make it writable for 1000.
# No Docker daemon runs where this project is developed: hadolint and tests/cli/test_release.py check the file, not the build.

FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY examples ./examples
COPY docs ./docs
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm AS cpu
# bubblewrap is the sandbox of program rewards. gcc builds pycosat, which the extra `tasks` needs (by reasoning-gym; it has no
# wheels), and the sampler's products of few rows, at their first use.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels
# torch first, from the index of CPU builds: the default index has CUDA builds of several gigabytes.
RUN pip install --no-cache-dir -c /constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu \
 && pip install --no-cache-dir -c /constraints.txt "gspo[report,tasks,models,lora,vision] @ file://$(ls /wheels/*.whl)" \
 && rm -rf /wheels
# WORKDIR would make a folder of root, in which gspo could not write a run.
RUN useradd --create-home --uid 1000 gspo && install --directory --owner gspo /work
USER gspo
WORKDIR /work
ENTRYPOINT ["gspo"]
CMD ["--help"]

FROM nvidia/cuda:12.9.1-base-ubuntu24.04 AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap gcc python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/gspo
ENV PATH=/opt/gspo/bin:$PATH
COPY constraints.txt /constraints.txt
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /constraints.txt torch==2.13.0 \
 && pip install --no-cache-dir -c /constraints.txt "gspo[report,tasks,models,lora,vision,ray] @ file://$(ls /wheels/*.whl)" \
 && rm -rf /wheels
# Ubuntu's image has a user `ubuntu` with the uid 1000.
RUN if id ubuntu; then userdel --remove ubuntu; fi && useradd --create-home --uid 1000 gspo && install --directory --owner gspo /work
USER gspo
WORKDIR /work
ENTRYPOINT ["gspo"]
CMD ["--help"]
