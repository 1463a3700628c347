"""Record classes: declared as dataclasses; at run time they are msgspec `Struct`s, which are created faster.

A frozen dataclass sets each field through `object.__setattr__`: with nine fields, creating one takes 2.8 µs, a `Struct`
with the same fields 0.17 µs. The functions `replace`, `fields` and `asdict` of `dataclasses` work on records.

The garbage collector ignores records, because the state of a stream worker contains very many. So a record must not
refer to an object that refers back to the record: such a cycle is never freed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen=False, slots=True):  # noqa: ANN001, ANN201 - as `dataclasses.dataclass`, for type checkers
        """Declare a dataclass with slots. Its fields may have a default or a `default_factory`, and no other option."""

        def default(each):  # noqa: ANN001, ANN202
            if not (slots and each.init and each.repr and each.compare and not each.kw_only):
                raise TypeError(f"{each.name}: a record has slots, and takes, shows and compares all of its fields")
            if each.default_factory is not dataclasses.MISSING:
                return (msgspec.field(default_factory=each.default_factory),)
            return () if each.default is dataclasses.MISSING else (each.default,)

        def made(cls):  # noqa: ANN001, ANN202
            if cls.__bases__ != (object,):
                raise TypeError(f"{cls.__name__}: a record has no base class")
            members = dict(vars(cls))
            plain = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)  # only its fields are used
            fields = dataclasses.fields(plain)
            for name in ("__dict__", "__weakref__", "__annotations__", *(each.name for each in fields)):
                members.pop(name, None)
            found = msgspec.defstruct(
                cls.__name__,
                [(each.name, each.type, *default(each)) for each in fields],
                namespace=members,
                module=cls.__module__,
                frozen=frozen,
                gc=False,
            )
            found.__qualname__, found.__dataclass_fields__ = cls.__qualname__, plain.__dataclass_fields__
            return found

        return made
