"""Names and amounts under the rules of Kubernetes and of container registries, with the nearest valid one.

label        RFC 1123: a to z, 0 to 9 and dashes, at most 63 characters        namespaces
subdomain    labels joined by dots, at most 253 characters                     most other objects
key          [SUBDOMAIN/]NAME                                                  labels, taints, resources
image        [HOST[:PORT]/]PATH[:TAG][@sha256:DIGEST]                          PATH in lower case
"""

from __future__ import annotations

import re

from lockstep.core.terminal import shortened

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_HOST = (
    r"(localhost|[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*|\[[0-9a-fA-F:]+\])"
)
_PATH = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?P<name>({_HOST}(:[0-9]+)?/)?{_PATH}(/{_PATH})*)(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
)
_QUANTITY = re.compile(r"(?P<number>[0-9]{1,15}(\.[0-9]{1,9})?)(?P<unit>m|k|[MGTPE]|[KMGTPE]i)?")
_FACTORS = {"m": 1e-3, "": 1.0, "k": 1e3} | {
    unit + suffix: float(base**power)
    for power, unit in enumerate("KMGTPE", start=1)
    for suffix, base in (("", 1000), ("i", 1024))
}
_MOST_OF_LABEL, _MOST_OF_SUBDOMAIN, _MOST_OF_IMAGE = 63, 253, 255


def is_label(text: str) -> bool:
    return len(text) <= _MOST_OF_LABEL and re.fullmatch(_LABEL, text) is not None


def is_subdomain(text: str) -> bool:
    return len(text) <= _MOST_OF_SUBDOMAIN and re.fullmatch(_SUBDOMAIN, text) is not None


def is_value(text: str) -> bool:
    """Return whether the text may be the value of a label."""
    return len(text) <= _MOST_OF_LABEL and (not text or re.fullmatch(_WORD, text) is not None)


def is_key(text: str) -> bool:
    """Return whether the text may be the key of a label or a taint, or the name of a resource."""
    prefix, slash, name = text.rpartition("/")
    return bool(name) and is_value(name) and (not slash or is_subdomain(prefix))


def name_mistake(text: str, what: str, *, label: bool = False) -> str:
    """Return why the text is not the name of an object, as a sentence; empty if it is.

    Args:
        what: The object, such as `a namespace`.
        label: Whether it has to be a label; otherwise a subdomain.
    """
    if is_label(text) if label else is_subdomain(text):
        return ""
    most, dots = (_MOST_OF_LABEL, "") if label else (_MOST_OF_SUBDOMAIN, " and dots")
    if len(text) > most:
        return f"{shortened(text)} is not the name of {what}: it has {len(text)} characters, of at most {most}"
    nearest = re.sub(r"[^a-z0-9]+" if label else r"[^a-z0-9.]+", "-", text.lower())
    nearest = ".".join(part.strip("-") for part in nearest.split(".") if part.strip("-"))
    ending = f"; did you mean {nearest}?" if nearest else ""
    rule = f"letters a to z, digits, dashes{dots} within it"
    return f"{shortened(text)} is not the name of {what}: {rule}{ending}"


def image_mistake(text: str) -> str:
    """Return why the text is not the name of an image, as a sentence; empty if it is."""
    match = _IMAGE.fullmatch(text)
    if match is not None and len(match["name"]) <= _MOST_OF_IMAGE:
        return ""
    if match is not None:
        return f"{shortened(text)} is not the name of an image: it has more than {_MOST_OF_IMAGE} characters"
    name, colon, tag = text.strip().rpartition(":") if ":" in text.rpartition("/")[2] else (text.strip(), "", "")
    nearest = re.sub(r"[^a-z0-9._/:-]+", "-", name.lower()).strip("-./:") + colon + re.sub(r"[^\w.-]+", "-", tag)
    guess = nearest if _IMAGE.fullmatch(nearest) else "registry.example/me/train:1"
    return f"{shortened(text)} is not the name of an image, which is [HOST/]PATH[:TAG] in lower case; write {guess}"


def quantity_mistake(text: str, unit: str) -> str:
    """Return why the text is not an amount above 0, as a sentence; empty if it is.

    Args:
        unit: Of bytes, such as `Gi`; empty: a number, such as of CPUs.
    """
    match = _QUANTITY.fullmatch(text)
    if match is not None and float(match["number"]) > 0 and not (unit and match["unit"] == "m"):
        return ""
    if not unit:
        return f"{shortened(text)} is not a number of CPUs above 0; write 16 or 500m"
    near = re.fullmatch(r"([1-9][0-9]*)(?:\.[0-9]+)?\s*([KMGTPE])i?B?", text, re.IGNORECASE)
    guess = f"{near[1]}{near[2].upper()}i" if near else f"200{unit}"
    return f"{shortened(text)} is not a size above 0; write {guess}"


def amount(quantity: str) -> float:
    """Return an amount as a number; 0 if it isn't one."""
    match = _QUANTITY.fullmatch(quantity)
    return float(match["number"]) * _FACTORS[match["unit"] or ""] if match else 0.0
