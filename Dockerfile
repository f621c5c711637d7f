FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY indexer indexer
COPY migrations migrations
RUN python -m venv /opt/indexer \
 && /opt/indexer/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim
RUN useradd --system --uid 10001 --home-dir /data indexer \
 && install --directory --owner=indexer --mode=0700 /data
COPY --from=build /opt/indexer /opt/indexer
ENV PATH=/opt/indexer/bin:$PATH \
    INDEXER_DATA_DIR=/data \
    INDEXER_HTTP_BIND=0.0.0.0:2580
USER indexer
VOLUME /data
EXPOSE 2580
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:2580/healthz', timeout=4)"]
ENTRYPOINT ["indexer"]
CMD ["run"]
