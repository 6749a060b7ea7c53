"""Which functions there are at which driver version, and what a request for them gets."""

import ctypes
from collections.abc import Callable

import pytest
from cuda_calls import INVALID_VALUE, SUCCESS, Cuda
from stand_in import VERSIONS, StandIn

FOUND, NOT_FOUND, VERSION_NOT_SUFFICIENT = range(3)

LoadStandIn = Callable[..., StandIn]


@pytest.mark.parametrize("version", VERSIONS)
def test_driver_says_the_version_it_was_loaded_with(
    load_stand_in: LoadStandIn, version: int
) -> None:
    said = ctypes.c_int()
    assert load_stand_in(version).control.cuDriverGetVersion(ctypes.byref(said)) == SUCCESS
    assert said.value == version


def test_five_argument_entry_point_is_there_from_12_on_only(load_stand_in: LoadStandIn) -> None:
    assert hasattr(load_stand_in(12040).control, "cuGetProcAddress_v2")
    older = load_stand_in(11080).control
    assert not hasattr(older, "cuGetProcAddress_v2")
    assert hasattr(older, "cuGetProcAddress")


@pytest.mark.parametrize("name", ["cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync"])
def test_batch_calls_have_two_forms_chosen_by_the_version_asked_for(
    load_stand_in: LoadStandIn, name: str
) -> None:
    cuda = Cuda(load_stand_in(13000))
    _, first, _ = cuda.entry_point(name, 12080)
    _, still_first, _ = cuda.entry_point(name, 12090)
    _, second, _ = cuda.entry_point(name, 13000)
    assert None not in (first, second)
    assert first == still_first != second


def test_a_version_newer_than_the_driver_is_refused(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(12080))
    assert cuda.entry_point("cuInit", 13000)[:2] == (INVALID_VALUE, None)
    assert cuda.entry_point_v1("cuInit", 13000) == (INVALID_VALUE, None)


def test_a_version_too_old_for_a_function_succeeds_with_a_null_pointer(
    load_stand_in: LoadStandIn,
) -> None:
    cuda = Cuda(load_stand_in(13000))
    assert cuda.entry_point("cuMemcpyBatchAsync", 12040) == (SUCCESS, None, VERSION_NOT_SUFFICIENT)
    assert cuda.entry_point_v1("cuMemcpyBatchAsync", 12040) == (SUCCESS, None)


def test_batch_calls_are_unknown_to_a_driver_without_them(load_stand_in: LoadStandIn) -> None:
    cuda = Cuda(load_stand_in(12040))
    assert cuda.entry_point("cuMemcpyBatchAsync", 12040) == (SUCCESS, None, NOT_FOUND)


def test_form_with_thirteens_parameters_is_not_in_a_driver_of_twelve(
    load_stand_in: LoadStandIn,
) -> None:
    cuda = Cuda(load_stand_in(12080))
    code, entry, status = cuda.entry_point("cuMemcpyBatchAsync", 12080)
    assert (code, status) == (SUCCESS, FOUND)
    assert entry is not None


def test_a_name_that_is_no_function_is_not_found(load_stand_in: LoadStandIn) -> None:
    assert Cuda(load_stand_in()).entry_point("cuMakeCoffee", 13000) == (SUCCESS, None, NOT_FOUND)


def test_errors_have_the_names_and_texts_of_the_driver(load_stand_in: LoadStandIn) -> None:
    lib = load_stand_in().control
    text = ctypes.c_char_p()
    assert lib.cuGetErrorName(712, ctypes.byref(text)) == SUCCESS
    assert text.value == b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert lib.cuGetErrorString(1, ctypes.byref(text)) == SUCCESS
    assert text.value == b"invalid argument"
    assert lib.cuGetErrorName(12345, ctypes.byref(text)) == INVALID_VALUE
    assert text.value is None
