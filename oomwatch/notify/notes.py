"""Sentences about the messages themselves: what came back, what was put together, what was lost."""

from __future__ import annotations

from typing import Final

from oomwatch.notify.recurrence import Recurrence
from oomwatch.report.locale import Language
from oomwatch.units import format_duration

_UNITS: Final = {"s": "秒", "min": "分钟", "h": "小时", "d": "天"}


def recurrence_note(again: Recurrence, lang: Language) -> str | None:
    """How often an incident has come back; None if it has not."""
    if again.count < 2:
        return None
    times, span = again.count, _duration(max(again.span_seconds, 1.0), lang)
    quiet = _duration(again.quiet_seconds, lang)
    if lang == "zh":
        if again.flapping:
            return f"反复出现：{span}内 {times} 次；持续不退或平静 {quiet}后会再通知。"
        return f"再次出现：{span}内第 {times} 次。"
    if again.flapping:
        return (
            f"It comes and goes, {times} times in {span}; you will hear of it again when it stays, "
            f"or has been quiet for {quiet}."
        )
    return f"It is back: {times} times in {span}."


def grouped_note(count: int, over: int, lang: Language) -> str:
    """How many incidents a message is about, and how many of them are over."""
    if lang == "zh":
        return f"同一主机上的 {count} 起事件" + (f"，其中 {over} 起已结束。" if over else "。")
    return f"{count} incidents of one host at once" + (f", {over} of them over." if over else ".")


def undelivered_note(sink: str, reason: str | None, lang: Language) -> str:
    """Which receiver did not get a message, and where to see what else it did not get."""
    if lang == "zh":
        return (
            f"接收方 {sink} 未收到此消息：{reason}。可能还有其他消息失败："
            "请在主机上运行 `oomwatch notify list --failed` 查看。"
        )
    return (
        f"The receiver {sink} did not get this message: {reason}. More may have failed: see "
        "`oomwatch notify list --failed` on the host."
    )


def _duration(seconds: float, lang: Language) -> str:
    text = format_duration(seconds)
    if lang == "en":
        return text
    number, _, unit = text.partition(" ")
    return f"{number} {_UNITS[unit]}"
