"""Types and field functions for the models of the chart's values.

Every leaf has a description and names the field of the object it ends up in (``renders``: kind, a colon, a regular
expression for the field's path); a test changes each leaf and looks there.  An ``example`` is a value for that test
where the default has no obvious alternative.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Object = dict[str, Any]  # part of a Kubernetes object, passed on unchanged
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Digest = Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64})?$")]
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?)?$")]
Cidr = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$")]
Port = Annotated[int, Field(ge=1, le=65535)]


class ValuesGroup(BaseModel):
    model_config = ConfigDict(extra="forbid")


def leaf(default: Any, description: str, renders: str, example: Any = None) -> Any:
    extra: dict[str, Any] = {"renders": renders}
    if example is not None:
        extra["example"] = example
    return Field(default, description=description, json_schema_extra=extra)


def group(default: Any, description: str) -> Any:
    return Field(default, description=description)


class Resources(ValuesGroup):
    requests: dict[str, Quantity | int] = leaf(
        {}, "what a pod asks for", "(WorkflowTemplate|StatefulSet|Deployment):requests", {"cpu": "150m"}
    )
    limits: dict[str, Quantity | int] = leaf(
        {}, "what it may use at most; `nvidia.com/gpu: 1` asks for a GPU",
        "(WorkflowTemplate|StatefulSet|Deployment):limits", {"cpu": "2", "memory": "4Gi", "ephemeral-storage": "4Gi"},
    )  # fmt: skip
