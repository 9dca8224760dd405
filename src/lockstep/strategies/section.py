"""The base class of every section of a config, and the types that sections share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lockstep.core.local_paths import checked_path_text
from lockstep.stores.addresses import checked_place_text, checked_run_place_text

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]
PathText = Annotated[str, AfterValidator(checked_path_text)]
PlaceText = Annotated[str, AfterValidator(checked_place_text)]  # a path, or the address of an object store
RunPlaceText = Annotated[str, AfterValidator(checked_run_place_text)]  # a path, never an address


class Section(BaseModel):
    """A frozen section; unknown keys are refused; `true` is no number and `"3"` no integer."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,  # except what is handed on to others, such as `arguments`
        ser_json_inf_nan="constants",
        defer_build=True,
        protected_namespaces=(),
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for why in self._contradictions():
            raise ValueError(why)
        return self

    def _contradictions(self) -> Iterable[str]:
        """Yield what is wrong with the values together, for sections where that may be; the first is reported."""
        return ()


def without_effect(section: Section, switch: str) -> str:
    """Return the keys of a section, except its switch, that aren't at their defaults, as a subject."""
    fields = type(section).model_fields
    names = [name for name, field in fields.items() if name != switch and getattr(section, name) != field.default]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}" if names else ""
