"""The models behind one gateway, found by any of their names."""

from collections.abc import Sequence

from core.errors import InvalidRequest, ModelNotFound
from gateway.caller import Caller
from gateway.loaded_model import LoadedModel


class Models:
    """Names are unique: the settings see to it (`core.served_models`)."""

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        self.all = tuple(models)
        self._by_name = {name: model for model in models for name in model.info.names}

    @property
    def only(self) -> str | None:
        """The name that need not be said; None where several are served."""
        return self.all[0].info.id if len(self.all) == 1 else None

    def known(self, name: str) -> LoadedModel | None:
        """Whoever may use it."""
        return self._by_name.get(name)

    def of(self, caller: Caller) -> list[LoadedModel]:
        """Those that the caller may use."""
        return [model for model in self.all if caller.may_use(*model.info.names)]

    def named(self, name: str, caller: Caller) -> LoadedModel:
        """The model of this name or alias.

        Raises ModelNotFound that tells those that the caller may use, also where the caller may
        not use this one: who may not does not learn whether it is there.
        """
        found = self._by_name.get(name)
        if found is not None and caller.may_use(*found.info.names):
            return found
        mine = self.of(caller)
        if not name:
            raise InvalidRequest("must name a model", field="model")
        if len(mine) < len(self.all):
            told = f"that this API key may use; it may use: {_listed(mine) or 'none'}"
        else:
            told = f"of that name; served: {_listed(mine)}"
        raise ModelNotFound(f"there is no model {told}")


def _listed(models: Sequence[LoadedModel]) -> str:
    """Each name, with what stands for it behind it."""
    words = []
    for model in models:
        also = f" (also {', '.join(model.info.aliases)})" if model.info.aliases else ""
        words.append(f"{model.info.id}{also}")
    return ", ".join(words)
