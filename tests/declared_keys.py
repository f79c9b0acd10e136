"""Scripts as a server runs them that lets a script touch no key but those which it is given, as Dragonfly does."""

from __future__ import annotations

import pytest

from zeroband.elastic.store.connection import Shape, StoreClient, StoreScript

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

    def script(client: StoreClient, text: str, answer: Shape) -> StoreScript:
        return StoreScript(client, _STRICT + text, answer)

    patch.setattr(StoreClient, "script", script)
