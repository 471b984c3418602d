"""What never or slowly changes of one GPU; what is "not supported" is None."""

from __future__ import annotations

from typing import Any, NamedTuple

from oomwatch.sources.kernel_events import normalize_pci
from oomwatch.sources.nvml_driver import Driver


class EccCounts(NamedTuple):
    """Memory errors of a GPU; volatile counts start anew with the driver."""

    volatile_corrected: int | None = None
    volatile_uncorrected: int | None = None
    aggregate_corrected: int | None = None
    aggregate_uncorrected: int | None = None


class RemappedRows(NamedTuple):
    """Memory rows that were replaced by spare ones; `pending` wants a reset, `failed` an RMA."""

    corrected: int
    uncorrected: int
    pending: bool
    failed: bool


class GpuFacts(NamedTuple):
    """What never or slowly changes of a GPU."""

    uuid: str | None
    name: str | None
    pci: str | None
    mig_enabled: bool | None
    ecc: EccCounts | None
    remapped_rows: RemappedRows | None
    reports_xid: bool | None


def read_cuda_version(driver: Driver) -> str | None:
    """The newest CUDA that the driver takes, as ``13.0``."""
    cuda = driver.ask("nvmlSystemGetCudaDriverVersion")
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None


def read_facts(driver: Driver, handle: Any) -> GpuFacts:
    """The facts of one GPU. Raises `NVMLError` if the GPU as a whole does not answer."""
    mig_mode = driver.ask("nvmlDeviceGetMigMode", handle)
    return GpuFacts(
        uuid=driver.ask("nvmlDeviceGetUUID", handle),
        name=driver.ask("nvmlDeviceGetName", handle),
        pci=_pci(driver, handle),
        mig_enabled=bool(mig_mode[0]) if mig_mode else None,
        ecc=_ecc(driver, handle),
        remapped_rows=_remapped_rows(driver, handle),
        reports_xid=_reports_xid(driver, handle),
    )


def _ecc(driver: Driver, handle: Any) -> EccCounts | None:
    pynvml = driver.pynvml
    counts = EccCounts(
        *(
            driver.ask("nvmlDeviceGetTotalEccErrors", handle, kind, counter)
            for counter in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC)
            for kind in (
                pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            )
        )
    )
    return None if all(count is None for count in counts) else counts


def _remapped_rows(driver: Driver, handle: Any) -> RemappedRows | None:
    rows = driver.ask("nvmlDeviceGetRemappedRows", handle)
    if rows is None:
        return None
    corrected, uncorrected, pending, failed = rows
    return RemappedRows(int(corrected), int(uncorrected), bool(pending), bool(failed))


def _reports_xid(driver: Driver, handle: Any) -> bool | None:
    types = driver.ask("nvmlDeviceGetSupportedEventTypes", handle)
    if types is None:
        return None
    return bool(types & driver.pynvml.nvmlEventTypeXidCriticalError)


def _pci(driver: Driver, handle: Any) -> str | None:
    info = driver.ask("nvmlDeviceGetPciInfo", handle)
    if info is None:
        return None
    bus_id = info.busId
    return normalize_pci(bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id)
