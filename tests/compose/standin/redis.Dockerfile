# Stands in for the official image of Redis where no registry of images is reached.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update -qq && apt-get install -qq --yes --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
RUN install -d -o redis -g redis /data
