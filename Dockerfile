# The image of the daemon: `docker build -t atproto-indexer .`
#
# It runs as user 10001. The root file system can be read-only: only /data (the volume) and /tmp are written to.
# Only the stage `native` needs a compiler, and its image has one. No stage installs a package of the distribution.
# This Python is built with profile-guided optimization. One without it is up to 1.9 times slower (docs/performance.md).
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG RUST_IMAGE=rust:1.95-slim-bookworm

# maturin builds the wheel of the native core. It is a program of its own, which needs no Python to run.
FROM ${PYTHON_IMAGE} AS maturin
COPY constraints.txt ./
RUN python -m venv --without-pip /opt/maturin \
 && pip --python /opt/maturin/bin/python install --no-cache-dir --only-binary :all: --constraint constraints.txt maturin

FROM ${RUST_IMAGE} AS native
COPY --from=maturin /opt/maturin/bin/maturin /usr/local/bin/
WORKDIR /src
COPY native native
RUN native/lock && maturin build --quiet --release --locked --manifest-path native/Cargo.toml --out /wheels

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/indexer
# Dependencies come first. This layer is built again only if one of these two files or the extras change.
COPY pyproject.toml constraints.txt ./
# Extras of the package, separated by spaces: `parquet` for `indexer export --format parquet` (170 MB).
ARG EXTRAS=
RUN python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
        names = [project['optional-dependencies'][extra] for extra in sys.argv[1:]]; \
        print(*sum(names, project['dependencies']), sep='\n')" $EXTRAS > dependencies.txt \
 && pip --python /opt/indexer/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt --requirement dependencies.txt
COPY README.md LICENSE ./
COPY migrations migrations
COPY indexer indexer
COPY --from=native /wheels /wheels
RUN pip --python /opt/indexer/bin/python install --no-cache-dir --no-deps --no-index --find-links /wheels \
        atproto-indexer-native \
 && pip --python /opt/indexer/bin/python install --no-cache-dir --no-deps .

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 indexer \
 && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin indexer \
 && install --directory --owner=indexer --group=indexer --mode=0700 /data
COPY --from=build /opt/indexer /opt/indexer
ENV PATH=/opt/indexer/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    INDEXER_DATA_DIR=/data \
    INDEXER_HTTP_BIND=0.0.0.0:2580
USER 10001:10001
WORKDIR /data
VOLUME /data
EXPOSE 2580
STOPSIGNAL SIGTERM
# In bash: it takes 3 ms of processor time, and the same check in Python 200 ms.
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=4 \
    CMD ["bash", "-c", "host=${INDEXER_HTTP_BIND%:*} host=${host//[][]/}; case $host in 0.0.0.0) host=127.0.0.1 ;; ::) host=::1 ;; esac; exec 3<>/dev/tcp/$host/${INDEXER_HTTP_BIND##*:} && echo -en 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3 && read -r -t 4 _ status _ <&3 && [ \"$status\" = 200 ]"]
ENTRYPOINT ["indexer"]
CMD ["run"]
# Last, so that another version or revision does not build the layers above again.
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="atproto-indexer" \
      org.opencontainers.image.description="A record-level sync indexer for the AT Protocol" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
