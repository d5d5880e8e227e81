# Stands in for the official image of PostgreSQL where no registry of images is reached.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update -qq && apt-get install -qq --yes --no-install-recommends postgresql && rm -rf /var/lib/apt/lists/* \
 && ln -s /usr/lib/postgresql/* /usr/lib/postgresql/current && install -d -m 0700 -o postgres -g postgres /var/lib/postgresql/data
# As in the official image: a tmpfs laid over it takes this mode, and not the owner.
RUN chmod 3777 /run/postgresql
ENV PATH=/usr/lib/postgresql/current/bin:$PATH PGDATA=/var/lib/postgresql/data
COPY postgres.sh /usr/local/bin/start-postgres
ENTRYPOINT ["sh", "/usr/local/bin/start-postgres"]
CMD ["postgres"]
