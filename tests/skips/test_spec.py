import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scalelong.skips import CS, IE, LS, LearnedScalar, NoScaling, SkipNorm, Uniform, parse_scaling
from scalelong.skips.spec import PerSkip

kappas = st.floats(0, 1, exclude_min=True)
axes = st.sampled_from(["paper", "channel"])
scalings = st.one_of(
    st.just(NoScaling()),
    st.builds(Uniform, kappas),
    st.builds(CS, kappas, st.booleans()),
    st.builds(PerSkip, st.lists(kappas, min_size=1, max_size=6).map(tuple)),
    st.builds(LS, st.integers(1, 10**18 - 1), st.sampled_from(["relu", "elu", "mish"]), st.booleans(), axes),
    st.builds(LearnedScalar, st.floats(allow_nan=False, allow_infinity=False)),
    st.builds(IE, st.booleans(), axes),
    st.builds(SkipNorm, st.floats(0, exclude_min=True, allow_infinity=False)),
)


@given(scalings)
@example(Uniform(2**-0.5))
@example(CS(1 / 3))
@example(LearnedScalar(-0.0))
def test_parse_undoes_print(scaling):
    assert parse_scaling(str(scaling)) == scaling


@given(st.text())
@example("cs:")
@example("cs:0.7:0.7")
@example("cs:1_0")
@example("cs:٠.٥")
@example("cs:infinity")
@example("ls:ratio=8,")
@example("ls:,")
@example("ls:=")
@example("none:1")
def test_garbage_is_a_value_error_or_reads_back(text):
    try:
        scaling = parse_scaling(text)
    except ValueError:
        return
    assert parse_scaling(str(scaling)) == scaling


@given(
    st.from_regex(
        r"(none|1/sqrt2|uniform|cs|cs-reversed|per-skip|ls|ls-per-skip|ls-channel|scalar|ie)(:.{0,12})?",
        fullmatch=True,
    )
)
def test_garbage_behind_a_known_name_too(text):
    test_garbage_is_a_value_error_or_reads_back.hypothesis.inner_test(text)


@pytest.mark.parametrize(
    ("text", "scaling"),
    [
        ("none", NoScaling()),
        ("1/sqrt2", Uniform(2**-0.5)),
        ("uniform:0.25", Uniform(0.25)),
        ("cs:0.7", CS(kappa=0.7)),
        ("cs:1", CS(kappa=1.0)),
        ("cs-reversed:0.7", CS(kappa=0.7, reverse=True)),
        ("per-skip:1/0.7/0.5", PerSkip((1.0, 0.7, 0.5))),
        ("ls", LS()),
        ("ls", LS(ratio=16, activation="relu", shared=True, over="paper")),
        ("ls:ratio=8,act=mish", LS(ratio=8, activation="mish")),
        ("ls-per-skip", LS(shared=False)),
        ("ls-channel", LS(over="channel")),
        ("ls-channel:shared=false", LS(shared=False, over="channel")),
        ("ls-per-skip:ratio=4", LS(ratio=4, shared=False)),
        ("scalar", LearnedScalar()),
        ("scalar:0.5", LearnedScalar(init=0.5)),
        ("ie", IE()),
        ("ie:over=channel", IE(over="channel")),
        ("ie:shared=false", IE(shared=False)),
        ("skip-norm", SkipNorm()),
        ("skip-norm:0.5", SkipNorm(0.5)),
    ],
)
def test_the_shortest_form_of_each(text, scaling):
    assert str(scaling) == text
    assert parse_scaling(text) == scaling


@pytest.mark.parametrize(
    ("long", "short"),
    [
        ("ls:shared=false", "ls-per-skip"),
        ("ls:over=channel", "ls-channel"),
        ("ls:shared=false,over=channel", "ls-channel:shared=false"),
        ("ls:ratio=16", "ls"),
        (" CS:.70 ", "cs:0.7"),
        ("uniform:0.7071067811865476", "1/sqrt2"),
        ("scalar:1.0", "scalar"),
    ],
)
def test_longer_forms_are_read_and_printed_short(long, short):
    assert str(parse_scaling(long)) == short


def test_a_scaling_passes_through():
    scaling = CS(0.5)
    assert parse_scaling(scaling) is scaling


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("cs:0", r"κ lies in \(0, 1\], got 0.0; try 'cs:0.7'"),
        ("cs:1.5", r"\(0, 1\], got 1.5"),
        ("cs:-0.5", r"\(0, 1\], got -0.5"),
        ("uniform:2", r"\(0, 1\], got 2.0; try 'uniform:0.7'"),
        ("cs-reversed:2", r"cs-reversed: κ lies in \(0, 1\], got 2.0; try 'cs-reversed:0.7'"),
        ("cs:nan", "one plain number, got 'nan'; write 'cs:0.7'"),
        ("cs:1e400", r"\(0, 1\]|finite"),
        ("cs", "needs a number after a colon, got none; write 'cs:0.7'"),
        ("cs:", "nothing follows the colon"),
        ("1/sqrt(2)", r"unknown scaling '1/sqrt\(2\)'; did you mean 1/sqrt2\? The known ones are none"),
        ("cs0.7", r"unknown scaling 'cs0.7'; did you mean 'cs:0.7'\?"),
        ("0.7", r"did you mean 'cs:0.7'\?"),
        ("cs-reversed-.5", r"did you mean 'cs-reversed:.5'\?"),
        ("sqrt2", r"did you mean 1/sqrt2\?"),
        ("ls4", r"did you mean ls\?"),
        ("cs1.5", r"'cs1.5'; the known ones are none"),
        ("skipnorm:2", r"did you mean skip-norm\? The known ones are none"),
        ("sc:0.7", "unknown scaling 'sc:0.7'; the known ones are none, 1/sqrt2, uniform:K, cs:K"),
        ("ls:0.7", "takes the options ratio=, act=, shared=, over=, got '0.7'.*give a constant κ to 'cs'"),
        ("ls:kappa=0.7", "takes the options"),
        ("ls:ratio=0", "whole number from 1 up, got 0"),
        ("ls:ratio=1.5", "whole number from 1 up, got '1.5'"),
        ("ls:act=tanh", "one of relu, elu, mish, got 'tanh'"),
        ("ls:shared=maybe", "true or false, got 'maybe'"),
        ("ls:ratio=4,ratio=8", "given twice"),
        ("ls-per-skip:shared=true", "takes the options ratio=, act=, over=, got 'shared=true'"),
        ("ls-channel:over=paper", "takes the options"),
        ("none:1", "takes no value"),
        ("per-skip", "plain numbers with / between, got ''; write 'per-skip:1/0.7/0.5'"),
        ("per-skip:1,0.7", "plain numbers with / between, got '1,0.7'"),
        ("per-skip:1/2", r"per-skip: κ lies in \(0, 1\], got 2.0"),
        ("ie:over=tokens", "one of paper, channel"),
        ("skip-norm:0", "positive, got 0.0"),
        ("skip-norm:x", "one plain number"),
        ("", "unknown scaling"),
    ],
)
def test_bad_strings_get_the_rule_the_value_and_the_fix(bad, says):
    with pytest.raises(ValueError, match=says):
        parse_scaling(bad)


@pytest.mark.parametrize(
    "build",
    [
        lambda: CS(kappa=math.nan),
        lambda: CS(kappa=math.inf),
        lambda: CS(kappa="0.7"),
        lambda: CS(kappa=True),
        lambda: CS(kappa=10**400),
        lambda: CS(kappa=0.7, reverse="yes"),
        lambda: Uniform(0),
        lambda: LearnedScalar(math.nan),
        lambda: LS(ratio=True),
        lambda: LS(ratio=0),
        lambda: LS(activation="gelu"),
        lambda: LS(over="pixel"),
        lambda: LS(shared=1),
        lambda: IE(over="x"),
        lambda: parse_scaling(0.7),
        lambda: parse_scaling(None),
    ],
)
def test_bad_values_are_value_errors(build):
    with pytest.raises(ValueError, match="got"):
        build()


def test_scalings_are_values():
    assert len({CS(0.5), CS(0.5), LS()}) == 2
    with pytest.raises(AttributeError):
        CS(0.5).kappa = 0.6


def test_given_coefficients_must_be_as_many_as_the_skips():
    given = PerSkip((1.0, 0.7, 0.5))
    assert given.coefficients(3) == (1.0, 0.7, 0.5)
    with pytest.raises(ValueError, match="one value for each of the 4 skips, got 3: 'per-skip:1/0.7/0.5'"):
        given.coefficients(4)
    for bad in ((), 0.7, "1/0.7"):
        with pytest.raises(ValueError, match="one number for each skip, got"):
            PerSkip(bad)
