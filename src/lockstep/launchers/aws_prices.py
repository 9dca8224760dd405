"""Looks up what instances cost: in AWS's price list if the credentials may read it, or in a small table with a date.

The table is no offer: prices change, and regions, spot, discounts, disks and traffic differ from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lockstep.core.errors import Failure
from lockstep.launchers.aws_calls import AwsCalls

_DATE, _REGION = "2026-08-26", "us-east-1"
_SOURCE = "a public copy of AWS's price list for Linux"
_ON_DEMAND = {
    "g6.2xlarge": 0.9776,
    "g6.4xlarge": 1.3232,
    "g6.12xlarge": 4.6016,
    "g6.16xlarge": 3.3968,
    "g6.24xlarge": 6.6752,
    "g6.48xlarge": 13.3504,
    "p4d.24xlarge": 21.957642,
    "p5.4xlarge": 6.88,
    "p5.48xlarge": 55.04,
}
"""Dollars an hour."""


def cost_note(aws: AwsCalls | None, region: str, instance_type: str, nodes: int, *, spot: bool) -> str:
    """Return a sentence about what the instances cost an hour, and where the price is from."""
    price, source = _listed(aws, region, instance_type), f"AWS's price list for {region}"
    if price is None and instance_type in _ON_DEMAND:
        price = _ON_DEMAND[instance_type]
        differs = "" if region == _REGION else f"; {region} differs"
        source = f"{_SOURCE} of {_DATE}, for {_REGION}{differs}"
    if price is None:
        return f"the cost of {instance_type} is unknown here; see AWS's price list"
    less = "; spot instances cost less, and how much changes by the hour" if spot else ""
    sum_text = f"{nodes} x {price:.4g} = {nodes * price:,.2f} dollars an hour on demand"
    return f"cost: {sum_text} ({source}), without disks and traffic{less}"


def _listed(aws: AwsCalls | None, region: str, instance_type: str) -> float | None:
    """Return the price on demand from AWS's price list; None if it can't be read."""
    if aws is None:
        return None
    wanted = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
    }
    filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
    try:
        prices = AwsCalls("us-east-1", aws.profile, attempts=1)  # the list is served in few regions
        listed = prices.call("pricing", "get_products", ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
        return next((price for text in listed for price in _dollars(json.loads(text))), None)
    except (Failure, KeyError, ValueError, TypeError, AttributeError):
        return None


def _dollars(product: Any) -> Iterator[float]:
    for term in product["terms"]["OnDemand"].values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"]["USD"])
            if dimension["unit"] == "Hrs" and price > 0:
                yield price
