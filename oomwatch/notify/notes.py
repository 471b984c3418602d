"""Sentences about the messages themselves: what came back, what was put together, what was lost."""

from __future__ import annotations

from typing import Final

from oomwatch.notify.recurrence import Recurrence
from oomwatch.report.locale import Language
from oomwatch.units import format_span

_UNITS: Final = {"s": "秒", "min": "分钟", "h": "小时", "d": "天"}


def recurrence_note(again: Recurrence, lang: Language) -> str | None:
    """How often an incident has come back; None if it has not."""
    if again.count < 2:
        return None
    times, lasted = again.count, span(max(again.span_seconds, 1.0), lang)
    quiet = span(again.quiet_seconds, lang)
    if lang == "zh":
        if again.flapping:
            return f"反复出现：{lasted}内 {times} 次；持续不退或平静 {quiet}后会再通知。"
        return f"再次出现：{lasted}内第 {times} 次。"
    if again.flapping:
        return (
            f"It comes and goes, {times} times in {lasted}; you will hear of it again when it "
            f"stays, or has been quiet for {quiet}."
        )
    return f"It is back: {times} times in {lasted}."


def restarts_note(starts: int, window_seconds: float | None, lang: Language) -> str:
    """How often an engine was started lately that fails each time."""
    if lang == "zh":
        lasted = f"在 {span(window_seconds, lang)}内" if window_seconds else "近来"
        return f"引擎{lasted}启动了 {starts} 次，每次都失败。"
    lasted = f" in {span(window_seconds, lang)}" if window_seconds else " lately"
    return f"It was started {starts} times{lasted} and fails each time."


def escalated_note(incident_id: str, open_seconds: float, lang: Language) -> str:
    """That nobody looks after an incident, and how to say that somebody does."""
    lasted, command = span(max(open_seconds, 0.0), lang), f"oomwatch notify ack {incident_id}"
    if lang == "zh":
        return f"已持续 {lasted}，无人确认。由您处理时请运行 `{command}`。"
    return f"Open for {lasted}, and nobody has acknowledged it: `{command}` says that you do."


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


def span(seconds: float, lang: Language) -> str:
    """``1 min 36 s``, ``1 分钟 36 秒``."""
    text = format_span(seconds)
    if lang == "en":
        return text
    return " ".join(_UNITS.get(word, word) for word in text.split(" "))
