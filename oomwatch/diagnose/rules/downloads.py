"""What a model hub means by its refusal: no access, or no model of that name."""

from __future__ import annotations

from oomwatch.diagnose.events import Failure


def refused_download(failure: Failure, model: str | None) -> str | None:
    """That the hub has no such model, where it says so; None where it has one and refuses it.

    A hub answers alike (401) for a name that is not there and for a model of somebody else's.
    """
    if failure.match("hub.no_repository") is None:
        return None
    return (
        f"The model hub has no model {model or 'of this name'} for this server: "
        "the name is misspelt, or the model is private and no token with access was given."
    )
