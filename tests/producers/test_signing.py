"""Keys, pseudonyms and signed interactions: accepted and refused values, and secrets that are never printed."""

from __future__ import annotations

import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError

from tidemill.producers.product.settings import KeysMissing, ProductSettings
from tidemill.producers.product.signing import LONGEST_TOKEN, NOBODY, BadToken, BadUserId, Pseudonyms, Signer

OLD, NEW, OTHER = "o" * 32, "n" * 32, "p" * 32
PRODUCT = ProductSettings(signing_keys=(SecretStr(OLD),), pseudonym_key=SecretStr(OTHER))
SIGNER = Signer(PRODUCT)
INTERACTIONS = st.text("abcXYZ019_-", min_size=1, max_size=64)


@given(INTERACTIONS, st.text(max_size=40))
def test_a_signed_token_is_verified_only_for_its_user(interaction_id: str, pseudonym: str):
    token = SIGNER.sign(interaction_id, pseudonym)
    assert len(token) <= LONGEST_TOKEN
    assert SIGNER.verify(token, pseudonym) == interaction_id
    with pytest.raises(BadToken, match="not served to this user"):
        SIGNER.verify(token, pseudonym + "x")


def test_no_letter_of_a_token_can_be_changed():
    token = SIGNER.sign("interaction-1", "user")
    for place in range(len(token)):
        for letter in "AZaz09-_.=é":
            if token[place] == letter:
                continue
            with pytest.raises(BadToken):
                SIGNER.verify(token[:place] + letter + token[place + 1 :], "user")


@given(st.text(max_size=200))
def test_any_other_text_is_refused_with_one_error(text: str):
    with pytest.raises(BadToken):
        SIGNER.verify(text, "user")


@pytest.mark.parametrize("token", [None, 7, b"a.b", "x" * 1_000_000, "a" * 64 + "." + "b" * 44, "a." + "\ud800" * 43])
def test_a_value_that_is_not_a_token_is_refused(token):
    with pytest.raises(BadToken):
        SIGNER.verify(token, "user")


def test_the_signature_binds_where_the_interaction_ends_and_the_user_begins():
    token = SIGNER.sign("ab", "c")
    with pytest.raises(BadToken):
        SIGNER.verify("a" + token[2:], "bc")


def test_the_first_key_signs_and_every_key_verifies():
    both = Signer(PRODUCT.model_copy(update={"signing_keys": (SecretStr(NEW), SecretStr(OLD))}))
    new = Signer(PRODUCT.model_copy(update={"signing_keys": (SecretStr(NEW),)}))
    assert both.verify(SIGNER.sign("i", "u"), "u") == "i"
    assert new.verify(both.sign("i", "u"), "u") == "i"
    with pytest.raises(BadToken):
        new.verify(SIGNER.sign("i", "u"), "u")


@pytest.mark.parametrize("interaction_id", ["", "a" * 65, "a.b", "a/b", "a\n", "é", "\x00tick/0"])
def test_an_interaction_id_that_does_not_fit_a_token_is_not_signed(interaction_id: str):
    with pytest.raises(ValueError, match="letters, digits"):
        SIGNER.sign(interaction_id, "u")


def test_a_pseudonym_is_the_same_only_for_the_same_user_and_key():
    names = Pseudonyms(PRODUCT)
    assert names.of("ann@product") == names.of("ann@product") != names.of("bob@product")
    assert len(names.of("ann@product")) == 32
    elsewhere = Pseudonyms(PRODUCT.model_copy(update={"pseudonym_key": SecretStr(NEW)}))
    assert elsewhere.of("ann@product") != names.of("ann@product")
    assert names.of(None) == NOBODY


@pytest.mark.parametrize("user", ["", "u" * 513, "é" * 257, "\ud800", 7])
def test_an_invalid_user_id_is_refused(user):
    with pytest.raises(BadUserId):
        Pseudonyms(PRODUCT).of(user)


def test_without_keys_the_error_says_how_to_make_them():
    for product in (ProductSettings(), ProductSettings(signing_keys=(SecretStr(OLD),))):
        for part in (Signer, Pseudonyms):
            with pytest.raises(KeysMissing, match=r"pseudonym_key.*openssl rand -hex 32"):
                part(product)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"signing_keys": [OLD, "short"]}, r"signing_keys\[1\] has fewer than 32"),
        ({"signing_keys": [""]}, r"signing_keys\[0\] has fewer than 32"),
        ({"pseudonym_key": "short"}, "pseudonym_key has fewer than 32"),
        ({"signing_keys": [OLD], "pseudonym_key": OLD}, "also a signing key"),
        ({"clock_skew_s": 61}, "less than or equal to 60"),
        ({"signing_key": OLD}, "Extra inputs"),
    ],
)
def test_unusable_settings_are_refused_without_their_secrets(values: dict, said: str):
    with pytest.raises(ValidationError, match=said) as refused:
        ProductSettings(**values)
    assert OLD not in str(refused.value) and "'short'" not in str(refused.value)


def test_secrets_are_not_printed():
    assert OLD not in repr(PRODUCT) and OTHER not in repr(PRODUCT)
    assert OLD not in PRODUCT.model_dump_json()


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert PRODUCT.environment()["TIDEMILL_PRODUCT__SIGNING_KEYS"] == f'["{OLD}"]'
    for name, value in PRODUCT.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TIDEMILL_KAFKA__BOOTSTRAP", "elsewhere:9092")
    assert ProductSettings.from_environment() == PRODUCT


def test_an_unusable_environment_is_refused_without_its_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TIDEMILL_PRODUCT__SIGNING_KEYS", '["secret-but-short"]')
    with pytest.raises(ValidationError, match="fewer than 32") as refused:
        ProductSettings.from_environment()
    assert "secret-but-short" not in str(refused.value)


def test_random_keys_are_used_once():
    first, second = ProductSettings.with_random_keys(), ProductSettings.with_random_keys()
    assert first.require_keys() != second.require_keys()


@pytest.mark.parametrize("length", [32, 64, 65, 200])
def test_the_hash_is_hmac_sha256(length: int):
    key = "k" * length
    product = ProductSettings.model_validate({"signing_keys": [OLD], "pseudonym_key": key})
    expected = hmac.digest(key.encode(), b"tidemill/pseudonym/1\x00ann", "sha256")
    assert Pseudonyms(product).of("ann") == expected.hex()[:32]
