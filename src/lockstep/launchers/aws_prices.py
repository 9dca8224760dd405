"""The price of an instance type, asked of AWS's price list: prices change, so none is written down here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lockstep.core.errors import Failure
from lockstep.launchers.aws_calls import AwsCalls
from lockstep.launchers.aws_options import AwsOptions


def cost_note(price: float | None, options: AwsOptions, region: str) -> str:
    """Return a sentence about what the instances cost.

    Args:
        price: Dollars an hour of one instance, on demand; None if it is unknown.
    """
    if price is None:
        return f"the cost of {options.type} wasn't read from AWS's price list (pricing:GetProducts)"
    less = "; spot instances cost less, and how much changes by the hour" if options.spot or options.spot_only else ""
    total = f"{options.nodes} x {price:.4g} = {options.nodes * price:,.2f} dollars an hour on demand"
    return f"cost: {total} (AWS's price list for {region}), without disks and traffic{less}"


def hourly_price(aws: AwsCalls, region: str, instance_type: str) -> float | None:
    """Return the dollars an hour of an instance on demand, from AWS's price list; None if it can't be read."""
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
