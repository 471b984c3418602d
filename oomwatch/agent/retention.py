"""How long the store keeps what, as the configuration says."""

from __future__ import annotations

from oomwatch.config.schema import StoreConfig
from oomwatch.store.retention import Retention


def retention_of(settings: StoreConfig) -> Retention:
    """The limits of a store."""
    return Retention(
        raw_seconds=int(settings.raw_retention_seconds),
        tier_seconds={
            10: int(settings.ten_second_retention_seconds),
            60: int(settings.minute_retention_seconds),
            3600: int(settings.hour_retention_seconds),
        },
        log_seconds=int(settings.log_retention_seconds),
        incident_seconds=int(settings.incident_retention_seconds),
        max_bytes=settings.max_size_bytes,
    )
