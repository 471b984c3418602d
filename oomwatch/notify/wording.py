"""What messages to people say in fixed words, in either language, and how a text message reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oomwatch.records import TriggerKind
from oomwatch.report.locale import Language

TRIGGERS: Final[Mapping[Language, Mapping[TriggerKind, str]]] = {
    "en": {
        "log_failure": "The engine's log reports a failure",
        "process_exit": "A process of the engine ended",
        "cgroup_oom": "The kernel killed something in the engine's control group",
        "kernel_oom": "The kernel's OOM killer killed a process",
        "kv_saturation": "The KV cache stays full",
        "preemption_storm": "Requests are preempted again and again",
        "never_fits": "A request waits that can never fit",
        "zombie_engine": "The port answers, the engine behind it does not work",
        "restart_loop": "The engine starts again and again and never serves",
        "driver_unresponsive": "The GPU driver does not answer",
        "gpu_lost": "A GPU is gone",
        "orphan_holder": "A process left behind holds GPU memory",
        "neighbour_growth": "Another process on the GPU grows",
        "gpu_headroom": "Little GPU memory is left",
        "host_headroom": "Little host memory is left",
        "forecast_kv": "The KV cache will be full soon",
        "forecast_gpu": "GPU memory will be used up soon",
        "forecast_host": "Host memory will be used up soon",
    },
    "zh": {
        "log_failure": "引擎日志报告故障",
        "process_exit": "引擎的进程已退出",
        "cgroup_oom": "内核终止了引擎控制组中的进程",
        "kernel_oom": "内核 OOM killer 终止了进程",
        "kv_saturation": "KV 缓存持续占满",
        "preemption_storm": "请求被反复抢占",
        "never_fits": "有请求在等待，却永远放不下",
        "zombie_engine": "端口有响应，但引擎已不工作",
        "restart_loop": "引擎反复启动，始终未能服务",
        "driver_unresponsive": "GPU 驱动无响应",
        "gpu_lost": "GPU 丢失",
        "orphan_holder": "残留进程占用显存",
        "neighbour_growth": "同一 GPU 上的其他进程在增长",
        "gpu_headroom": "GPU 剩余显存不足",
        "host_headroom": "主机剩余内存不足",
        "forecast_kv": "KV 缓存即将占满",
        "forecast_gpu": "显存即将耗尽",
        "forecast_host": "主机内存即将耗尽",
    },
}

_WORDS: Final[Mapping[Language, Mapping[str, str]]] = {
    "en": {
        "undiagnosed": "An incident that is not explained yet",
        "cured": "It serves again, with other flags.",
        "serves_again": "It serves again, with the same flags.",
        "remove": "remove {flags}",
        "long_flags": "get the flags with `oomwatch flags {id}`",
        "then": "; ",
        "and": ", ",
    },
    "zh": {
        "undiagnosed": "尚未查明的事件",
        "cured": "已恢复服务，参数有改动。",
        "serves_again": "已恢复服务，参数未改动。",
        "remove": "去掉 {flags}",
        "long_flags": "用 `oomwatch flags {id}` 取得参数",
        "then": "；",
        "and": "，",
    },
}


def words(lang: Language) -> Mapping[str, str]:
    """The fixed words of one language."""
    return _WORDS[lang]
