"""Copies to and from a bucket, beside boto3's of the same files.

``python tests/bench/bucket_copies.py`` prints a line for each, the best of three. The service is
moto's S3 on loopback, a Python program that is the limit for both.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.cloud_services import CloudBucket, s3

import blobstore
from blobstore.formats.documents import Manifest
from blobstore.io.objects import open_bucket
from blobstore.names import ModelName
from blobstore.store.bucket.blob_cache import BlobCache
from blobstore.testing.blobs import descriptor_of

BLOBS, NBYTES, TIMES, FILES = 12, 40_000_000, 3, 4
M = ModelName.parse("m")


def main() -> None:
    """Print a line for each way of copying."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, s3(Path(folder) / "s3") as cloud:
        root = Path(folder)
        store = blobstore.open_store(root / "store")
        with store.session() as session:
            layers = []
            for _ in range(BLOBS):
                data = os.urandom(NBYTES)
                layers.append(descriptor_of(data))
                session.put(data)
            session.publish(M, Manifest(layers=tuple(layers)))
        files = sorted((root / "store" / "blobs").iterdir())
        client = client_of(cloud)

        def bucket(number: int, **options: Any) -> blobstore.BucketStore:
            opened = open_bucket(f"{cloud.address}/b{number}", cloud.options)
            return blobstore.BucketStore(opened, **options)

        def each(do: Callable[[Path], object]) -> None:
            with ThreadPoolExecutor(FILES) as pool:
                list(pool.map(do, files))

        def bring(number: int) -> None:
            near = bucket(0, cache=BlobCache(root / f"cache{number}"))
            near.prefetch(near.manifests.read(M).descriptors)

        def fetch(number: int) -> None:
            target = root / f"files{number}"
            target.mkdir()
            each(lambda f: client.download_file("models", f"p0/{f.name}", str(target / f.name)))

        ways: dict[str, Callable[[int], object]] = {
            "cp to the bucket": lambda n: blobstore.transfer(M, store, bucket(n)),
            "boto3 upload_file": lambda n: each(
                lambda f: client.upload_file(str(f), "models", f"p{n}/{f.name}")
            ),
            "cp from the bucket": lambda n: blobstore.transfer(
                M, bucket(0), blobstore.open_store(root / f"copy{n}")
            ),
            "into the cache": bring,
            "boto3 download_file": fetch,
        }
        for name, way in ways.items():
            seconds = min(timed(way, number) for number in range(TIMES))
            print(f"{name}: {seconds:.2f} s, {BLOBS * NBYTES / 1e6 / seconds:.0f} MB/s")


def timed(way: Callable[[int], object], number: int) -> float:
    """Return the seconds that one copy takes."""
    began = time.monotonic()
    way(number)
    return time.monotonic() - began


def client_of(cloud: CloudBucket) -> Any:
    """Return boto3's client of a bucket."""
    import boto3  # type: ignore[import-untyped]
    from botocore.config import Config  # type: ignore[import-untyped]

    return boto3.client(
        "s3",
        endpoint_url=cloud.options["endpoint"],
        aws_access_key_id=cloud.options["access_key_id"],
        aws_secret_access_key=cloud.options["secret_access_key"],
        region_name=cloud.options["region"],
        config=Config(max_pool_connections=10 * FILES),
    )


if __name__ == "__main__":
    main()
