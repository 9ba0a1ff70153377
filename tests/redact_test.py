import pytest

from composer_jax.redact import MASK, redact


@pytest.mark.parametrize('name', [
    'api_key', 'apikey', 'OPENAI_API_KEY', 'hf_token', 'token', 'password', 'db-password', 'secret',
    'client_secret', 'private_key', 'aws.access_key', 'credentials', 'Authorization'])
def test_secret_by_name(name):
  assert redact({'a': [{name: 'plain-looking'}]}) == {'a': [{name: MASK}]}


@pytest.mark.parametrize('value', [
    'sk-abcdefghijklmnopqrstuv', 'hf_abcdefghijklmnopqrst', 'ghp_abcdefghijklmnopqrstuvwx',
    'AKIAABCDEFGHIJKLMNOP', 'xoxb-1234567890-abc', 'eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSM'])
def test_secret_by_value(value):
  shown = redact({'note': f'use {value} here'})['note']
  assert value not in shown and shown == f'use {MASK} here'


def test_bearer_and_url_passwords():
  assert redact('Authorization: Bearer abcdef0123456789') == f'Authorization: Bearer {MASK}'
  assert redact('https://user:pa55word@host/x') == f'https://{MASK}@host/x'


def test_ordinary_values_stay():
  config = {'max_tokens': 256, 'tokenizer': 'tokenizer.json', 'tokens_per_s': 1.5, 'token': '',
            'api_key': None, 'url': 'https://host/path', 'keys': ['a', 1, None, True],
            'min_token_length': 'x', 'text': 'sk-short'}
  assert redact(config) == config
