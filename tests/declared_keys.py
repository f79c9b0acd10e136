"""Scripts as a server runs them that lets a script touch no key but those which it is given, as Dragonfly does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from zeroband.elastic.store.connection import StoreClient
from zeroband.elastic.store.scripts import Script

_STRICT = """
local given, plain = {}, redis
for _, key in ipairs(KEYS) do given[key] = true end
local function strict(call)
  return function(...)
    local command, key = ...
    if command ~= 'TIME' and not given[key] then error(command .. ' of undeclared key ' .. tostring(key)) end
    return call(...)
  end
end
local redis = setmetatable({call = strict(plain.call), pcall = strict(plain.pcall)}, {__index = plain})
"""


def refuse_undeclared_keys(patch: pytest.MonkeyPatch) -> None:
    """Have the scripts of this process fail where they touch another key."""
    execute = StoreClient.execute_script

    @cache
    def strict(script: Script) -> Script:
        return replace(script, text=_STRICT + script.text)

    def execute_script(client: StoreClient, script: Script, *given: Any, **options: Any) -> Any:
        return execute(client, strict(script), *given, **options)

    patch.setattr(StoreClient, "execute_script", execute_script)
