# A container that trains and passes the tests:
#     docker build -t project . && docker run --rm -it -v "$PWD/runs:/project/runs" project make train
FROM python:3.12-slim-bookworm

# make and git for every command, g++ for compiled updates, libegl1 for MuJoCo's own renderer (without it, rays).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libegl1 make \
    && rm -rf /var/lib/apt/lists/*

# Not root: torch's caches, the files in runs/ and git's ownership check are then those of a usual account.
RUN useradd --create-home --uid 1000 researcher && mkdir /project && chown researcher /project
USER 1000
WORKDIR /project

# The dependencies are a layer of their own, which only a new lock makes again.
COPY --chown=researcher Makefile pyproject.toml requirements.lock ./
COPY --chown=researcher scripts/setup.sh scripts/
RUN make install

# With .git: each run records its code there.
COPY --chown=researcher . .
CMD ["make", "help"]
