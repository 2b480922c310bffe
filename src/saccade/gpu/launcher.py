"""Launcher: kernels prepared once for calls like one another, then started by CUDA's driver.

Triton's own front door looks at every argument of every call to find the kernel that fits, which
takes longer than a small problem does. Here a start of a kernel is a block of memory that holds its
parameters. Between calls like one another only addresses change, and are written into it; then the
driver is told to go. A call of another length fills such a block anew, for the same machine code.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import driver, machine_code
from saccade.gpu.language import INTERPRETED, Constant, Deferred, resolved
from saccade.gpu.signature import (
    ALIGNMENT,
    FIXED,
    FUSED,
    LARGEST_INT32,
    UNKNOWN,
    Arguments,
    Described,
    identity,
    source_of,
    type_of,
)

MAP_SIZE = driver.TENSOR_MAP_SIZE
NO_MAP = bytes(MAP_SIZE)
MOST_MAPS = 512  # addresses of one tensor of calls like one another; each takes 128 bytes

Maps = tuple[int, int, dict[int, bytes]]
"""A tensor that TMA moves: its number, its byte of memory, its descriptors by address."""

MakeArguments = Callable[[], tuple[Any, ...]]
"""Makes a kernel's arguments, nested as it takes them; a Tensor stands for its address."""


class Form:
    """What launches share that differ in lengths alone: constants, in the order of the kernel."""

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], meta: type[tuple[Any, ...]] | None
    ):
        self.passed = dict(constants) if meta is None else bundled(constants, meta)
        first = len(kernel.arg_names) - len(self.passed)
        self.constants = [self.passed[name] for name in kernel.arg_names[first:]]
        self.key = identity(self.constants)


_forms: dict[Any, Form] = {}


def form_of(kernel: Any, constants: Mapping[str, Any], meta: type[tuple[Any, ...]] | None) -> Form:
    """The form of a launch; there are as many as kernels have constants, whatever the lengths."""
    key = kernel, meta, INTERPRETED, *constants, *constants.values(), *map(type, constants.values())
    found = _forms.get(key)
    if found is None:
        found = _forms[key] = Form(kernel, constants, meta)
    return found


class Launch:
    """One kernel for calls like one another on one device.

    Calls that are alike but for their numbers (lengths, strides, what follows from them) have one
    each, which `of` makes: what the kernel is compiled for, and where its parameters come from, is
    worked out once for all of them.
    """

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, int],
        meta: type[tuple[Any, ...]] | None = None,
    ):  # fmt: skip
        """constants: the kernel's constexprs by name. meta: the NamedTuple that it takes those of
        its fields in, as one argument META."""
        self.kernel, self.constants, self.options = kernel, constants, options
        self.form = form_of(kernel, constants, meta)
        self.numbers: tuple[int, ...] = ()
        self.present: tuple[bool, ...] = ()
        self.templates: dict[Any, Templates] = {}  # by what else tells calls of one Launch apart
        self.start: AnyStart | None = None  # of the last call
        self.starts: dict[Any, AnyStart] = {}  # by the same

    def of(self, numbers: tuple[int, ...], present: tuple[bool, ...] = ()) -> Launch:
        """A launch of this kernel for calls with these numbers.

        The functions that make arguments for it may look at numbers only to hand them on: what a
        kernel is handed without a source (`signature.Number`) is taken to differ from call to call.

        present: which tensors there are, of those that only some calls of one Launch have.
        """
        made = object.__new__(Launch)
        made.kernel, made.constants, made.options = self.kernel, self.constants, self.options
        made.form, made.templates = self.form, self.templates
        made.numbers, made.present = numbers, present
        made.start, made.starts = None, {}
        return made

    @property
    def shared(self) -> int:
        """A number that launches have in common if one was made of the other."""
        return id(self.templates)

    def __call__(
        self, programs: int, device: int | None, tensors: Sequence[Tensor], arguments: MakeArguments
    ) -> None:
        """Start so many programs on the device's current stream.

        tensors: all whose addresses the arguments hold, in the same order every time.
        arguments: makes the arguments. Between calls of one Launch nothing but addresses may
            differ, so it is asked the first time only; and between those of one family, numbers.
        """
        if programs == 0 or self.relaunch(programs, device, tensors):
            return
        if INTERPRETED or device is None:
            self._interpret(programs, arguments)
        elif (noted := getattr(_noting, "launches", None)) is not None:
            noted.append((self.kernel, self.arguments(arguments()), self.options))
        elif torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(programs, device, tensors, arguments)
        else:
            start = self._prepare(device, tensors, arguments)
            started = start(programs, torch._C._cuda_getCurrentRawStream(device), tensors)
            assert started, "tensors do not fit what was prepared for them"
            self.start = start if start.first else None

    def relaunch(self, programs: int, device: int | None, tensors: Sequence[Tensor]) -> bool:
        """Start it as before; False, and nothing is started, where that does not fit."""
        if self.start is None or device is None or torch._C._cuda_getDevice() != device:
            return False
        return self.start(programs, torch._C._cuda_getCurrentRawStream(device), tensors)

    def _interpret(self, programs: int, arguments: MakeArguments) -> None:
        values = map(plain, arguments())
        options = {**FUSED, **self.options}
        self.kernel[(programs,)](*values, **self.form.passed, **options)

    def _prepare(
        self, device: int, tensors: Sequence[Tensor], arguments: MakeArguments
    ) -> AnyStart:
        key = told_apart(tensors)
        start = self.starts.get(key)
        if start is not None:
            return start
        of_family = self.present, *key
        templates = self.templates.get(of_family)
        template = None
        if templates is not None:
            template = templates.find(self.numbers)
        if template is None:
            given = self.arguments(arguments())
            variant = machine_code.variant(self.kernel, given, self.options, device)
            if variant.by_triton:
                return TritonStart(variant, given)
            template = Template(variant, given, tensors, self.numbers)
            if template.general:
                templates = self.templates.setdefault(of_family, Templates(len(self.numbers)))
                templates.add(template, given, self.numbers)
        start = Start(template, self.numbers)
        if template.complete:
            self.starts[key] = start
        return start

    def arguments(self, values: tuple[Any, ...]) -> Arguments:
        """All that the kernel takes: what `MakeArguments` gave, then its constants."""
        return Arguments(values, self.form.constants, self.form.key)


_noting = threading.local()  # what a thread notes instead of starting it


def compile_side_by_side(run: Callable[[], Any], device: int | None) -> bool:
    """Compile what `run` would start for the first time, by a thread each, and start none of it.

    Kernels of one pass come one after the other, and so would their compilations: Triton lets
    other threads run in most of that time.
    """
    if not INTERPRETED and device is not None:
        machine_code.find_side_by_side(_noted(run), device)
    return True


def compile_ahead(run: Callable[[], Any], device: int | None) -> bool:
    """Begin to compile what `run` would start, for a call that is still to come.

    Nothing of that is this call's: what cannot be served is for the call that it is for to refuse.
    """
    if not INTERPRETED and device is not None:
        with suppress(Exception):
            machine_code.begin_to_find(_noted(run), device, urgent=False)
    return True


def _noted(run: Callable[[], Any]) -> list[machine_code.Wanted]:
    """What `run` would start, none of which is started."""
    _noting.launches = noted = []
    try:
        run()
    finally:
        del _noting.launches
    return noted


def bundled(constants: Mapping[str, Any], meta: type[tuple[Any, ...]]) -> dict[str, Any]:
    """Constants as a kernel takes them whose argument META holds those that `meta` names."""
    fields: tuple[str, ...] = meta._fields  # type: ignore[attr-defined]
    rest = {name: value for name, value in constants.items() if name not in fields}
    known = {name: constants[name] for name in fields if name in constants}
    if not INTERPRETED:  # Triton reads off a tuple what lies in it; its interpreter is plain Python
        known = {name: Constant(value) for name, value in known.items()}
    return {**rest, "META": meta(**known)}


def told_apart(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What tells calls of one Launch apart but for numbers: how many tensors there are, which of
    them are the same, and whose addresses are aligned."""
    bits = 0
    for address in [tensor.data_ptr() for tensor in tensors]:
        bits |= address
    if bits % ALIGNMENT == 0 and len(set(map(id, tensors))) == len(tensors):
        return (len(tensors),)
    ids = [id(tensor) for tensor in tensors]
    alignments = [tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors]
    return (*map(ids.index, ids), *alignments)


class Moved(NamedTuple):
    """A tensor that TMA moves: how its descriptor is made."""

    number: int  # among the tensors of a launch
    byte: int  # of memory
    kind: driver.TensorMapKind
    shape: slice  # of the parameters: where its shape is
    strides: slice

    def described(self, address: int, values: Sequence[int]) -> bytes:
        """The descriptor; values: all parameters of the launch."""
        return described(self.kind, address, values[self.shape], values[self.strides])


class Template:
    """How a kernel's parameters are made of the numbers of a call, and of its addresses."""

    def __init__(
        self, variant: machine_code.Variant, arguments: Arguments, tensors: Sequence[Tensor],
        numbers: Sequence[int] = (),
    ):  # fmt: skip
        """numbers: those of the call, whose places arguments know."""
        self.variant = variant
        self.family: Templates | None = None  # that hold it for calls of other numbers
        self.places = {id(tensor): place for place, tensor in reversed([*enumerate(tensors)])}
        self.same = [  # tensors that are one and the same cannot be told apart, so must be again
            (self.places[id(tensor)], place)
            for place, tensor in enumerate(tensors)
            if self.places[id(tensor)] != place
        ]
        self.complete = True  # whether all addresses are those of `tensors`
        # Whether it serves other numbers; not where it is unknown which of them stands where.
        looked_at = (*arguments.compiled_in, *arguments.classed)
        self.general = len(numbers) > 0 and all(source_of(one) != UNKNOWN for one in looked_at)
        self.aligned: list[int] = []  # tensors whose addresses the kernel takes for aligned
        self.pointers: list[tuple[int, int]] = []  # tensor, word of memory
        self.maps: list[Moved] = []
        self.rest: list[Any] = []  # what is packed beside the call's numbers
        self.pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # all parameters, of both
        self._read(arguments, numbers)
        del self.places  # of tensors that need not live
        # Whether later calls try it first. What was made for tensors that are not aligned would fit
        # aligned ones as well, and is slower.
        aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
        self.first = self.complete and aligned

    def _read(self, arguments: Arguments, numbers: Sequence[int]) -> None:
        """Find where each parameter comes from: a place among the numbers, or behind them."""
        values: list[Any] = [*arguments.numbers, *machine_code.NO_SCRATCH]
        kinds, moved = iter(self.variant.maps), set[int]()
        for place in arguments.addressed:
            if type(values[place]) is Described:
                moved |= {*range(place + 1, place + 1 + 2 * len(values[place].shape))}
            values[place] = self._addressed(values[place], place, kinds)
        self.pack = self.variant.format.pack
        if not numbers:  # in the way of each new length of calls whose numbers have no sources
            self.pick, self.rest = tuple, values
            return
        sources: list[int] = []
        fixed = {*arguments.addressed, *range(len(arguments.numbers), len(values))}
        for place, value in enumerate(values):
            source = FIXED
            if place not in fixed and isinstance(value, int):
                source = source_of(value)
                assert source < 0 or numbers[source] == value, "a number of another call"
                # A number of 64 bits has 32 in calls where it is small, unless all have the same.
                wide = arguments.kinds[place] == "i64" and place not in moved and source != FIXED
                self.general &= source != UNKNOWN and not wide
            if source < 0:
                source = len(numbers) + len(self.rest)
                self.rest.append(int(value) if isinstance(value, int) else value)
            sources.append(source)
        self.pick = operator.itemgetter(*sources)

    def filled(self, numbers: Sequence[int]) -> tuple[Any, ...]:
        """All parameters of a call with these numbers."""
        return self.pick((*numbers, *self.rest))

    def _addressed(self, value: Any, place: int, kinds: Iterator[driver.TensorMapKind]) -> Any:
        """What is packed for a tensor at a place of the parameters, or for one that TMA moves,
        where each start writes what belongs there; an address of one call only, as it is."""
        if type(value) is not Described:
            number = self._address(value)
            if number is None:
                return value.data_ptr()
            self.pointers.append((number, self.variant.offsets[place] // machine_code.ADDRESS_SIZE))
            return 0
        kind, number = next(kinds), self._address(value.tensor)
        if number is None:
            return described(kind, value.tensor.data_ptr(), value.shape, value.strides)
        first, axes = place + 1, len(value.shape)
        middle, byte = first + axes, self.variant.offsets[place]
        sides = slice(first, middle), slice(middle, middle + axes)
        self.maps.append(Moved(number, byte, kind, *sides))
        return NO_MAP

    def _address(self, tensor: Tensor) -> int | None:
        """Which tensor of the call it is, whose address each start writes; None: another one,
        whose address is that of one call only."""
        number = self.places.get(id(tensor))
        if number is None:
            self.complete = self.general = False
        elif tensor.data_ptr() % ALIGNMENT == 0 and number not in self.aligned:
            self.aligned.append(number)
        return number


class Templates:
    """Templates of one Launch, by all that kernels are compiled for of a call's numbers."""

    def __init__(self, count: int) -> None:
        self.count = count  # numbers of a call
        self.compiled_in: list[int] = []  # places of numbers that are constants of the kernel
        self.classed: list[int] = []  # of those of which it counts what they are multiples of
        self.found: dict[tuple[int, ...], Template] = {}  # another one where these grow

    def find(self, numbers: tuple[int, ...]) -> Template | None:
        """The template for a call with these numbers."""
        assert len(numbers) == self.count, "numbers of another kind of call"
        if not are_small(numbers):
            return None  # it may be one of those that have 32 bits
        return self.found.get(key_at(numbers, self.compiled_in, self.classed))

    def add(self, template: Template, arguments: Arguments, numbers: tuple[int, ...]) -> None:
        """Keep a template that was made with these numbers."""
        looked_at = (
            (self.compiled_in, arguments.compiled_in),
            (self.classed, arguments.classed),
        )
        for places, more in looked_at:
            new = {source_of(number) for number in more} - {UNKNOWN, FIXED, *places}
            if new:
                self.found = {}  # keys of more numbers
            places += sorted(new)
        if are_small(numbers):
            self.found[key_at(numbers, self.compiled_in, self.classed)] = template
            template.family = self


def are_small(numbers: Sequence[int]) -> bool:
    """Whether 32 bits are enough for each."""
    return max(numbers) <= LARGEST_INT32 and min(numbers) >= -LARGEST_INT32


def key_at(
    numbers: Sequence[int], compiled_in: Sequence[int], classed: Sequence[int]
) -> tuple[int, ...]:
    """What a kernel is compiled for of a call's numbers: those that are constants of it, and of
    others whether they are 1, or multiples of 16."""
    classes = [number == 1 if (number := numbers[place]) % ALIGNMENT else 2 for place in classed]
    return *[numbers[place] for place in compiled_in], *classes


class Start:
    """A kernel's parameters, for calls like one another: all but addresses are known."""

    def __init__(self, template: Template, numbers: Sequence[int]):
        self.template = template
        self.values = template.filled(numbers)
        self.parameters = template.pack(*self.values)
        # Descriptors by address, of each tensor that TMA moves: one says where a tensor lies and
        # how, and not which one it is; a launch, or a graph that is captured, copies it. So it
        # serves whatever tensor comes to lie there.
        self.maps: list[Maps] = [(moved.number, moved.byte, {}) for moved in template.maps]
        self.first = template.first

    def __call__(self, programs: int, stream: int, tensors: Sequence[Tensor]) -> bool:
        """Start so many programs for other tensors; False, and nothing, if these do not fit."""
        template, addresses = self.template, [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for number in template.aligned:
            bits |= addresses[number]
        if bits % ALIGNMENT:
            return False
        for first, number in template.same:
            if addresses[first] != addresses[number]:
                return False
        if watched.by is not None:
            watched.by(self, programs, addresses)
        self.at(programs, stream, addresses, template.pointers, self.maps)
        return True

    def at(
        self, programs: int, stream: int, addresses: Sequence[int],
        pointers: Sequence[tuple[int, int]], maps: Sequence[Maps],
    ) -> None:  # fmt: skip
        """Start so many programs at these addresses, which fit.

        pointers, maps: which of the addresses goes where, as `Template.pointers` and `Start.maps`.
        """
        variant = self.template.variant
        memory, words = variant.memory, variant.words
        with variant.lock:  # another thread may start it meanwhile, and the driver lets it
            memory[:] = self.parameters
            for number, word in pointers:
                words[word] = addresses[number]
            for number, byte, known in maps:
                found = known.get(addresses[number])
                if found is None:
                    found = self._describe(byte, known, addresses[number])
                memory[byte : byte + MAP_SIZE] = found
            variant.launch(programs, stream)

    def _describe(self, byte: int, maps: dict[int, bytes], address: int) -> bytes:
        """The descriptor of the tensor at an address that moves by the one at a byte."""
        if len(maps) >= MOST_MAPS:
            maps.clear()
        moved = next(one for one in self.template.maps if one.byte == byte)
        found = maps[address] = moved.described(address, self.values)
        return found


class TritonStart:
    """A kernel that Triton's own launcher starts: its arguments are put together in each call."""

    first = False

    def __init__(self, variant: machine_code.Variant, arguments: Arguments):
        self.compiled = variant.compiled
        self.values = *map(plain, arguments.values), *map(plain, arguments.constants)

    def __call__(self, programs: int, stream: int, tensors: Sequence[Tensor]) -> bool:
        """Start so many programs for the tensors that it was made with."""
        if watched.by is not None:
            watched.by(self, programs, ())
        self.compiled[(programs, 1, 1)](*self.values, stream=stream)
        return True


AnyStart = Start | TritonStart


class Watched(threading.local):
    """Who is told of every start of this thread, before it is made (`recording.py`)."""

    by: Callable[[AnyStart, int, Sequence[int]], None] | None = None


watched = Watched()


def described(
    kind: driver.TensorMapKind, address: int, shape: Sequence[int], strides: Sequence[int]
) -> bytes:
    """The descriptor of a tensor for TMA."""
    return driver.tensor_map(kind, address, shape, usable(shape, strides))


def usable(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides as TMA takes them: a side of one has any, and it wants one that it could use."""
    found = [
        stride if side != 1 else ALIGNMENT for side, stride in zip(shape, strides, strict=True)
    ]
    found[-1] = 1
    return found


def plain(value: Any) -> Any:
    """An argument as Triton itself takes it."""
    if isinstance(value, Described):
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        strides = usable(value.shape, value.strides)
        shape, sides = ([int(side) for side in sides] for sides in (value.shape, value.sides))
        return TensorDescriptor(value.tensor, shape, strides, sides, resolved(value.layout))
    if isinstance(value, tuple):
        parts = map(plain, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Deferred):
        return value.resolve()
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    wide = INTERPRETED and type_of(int(value)) == "i64"
    return _of_64_bits(value) if wide else int(value)


def _of_64_bits(number: int) -> Any:
    """A number for the interpreter, which would take one of 31 bits for one of 32."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(np.array([number], dtype=np.int64), tl.int64), tl.int64)


def current_device(tensor: Tensor) -> int | None:
    """The index of a tensor's GPU; None for a CPU tensor under the interpreter."""
    return None if tensor.device.type == "cpu" else tensor.device.index


def next_width(dim: int) -> int:
    """The number of channels that a kernel computes with: a power of two of at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
