-- One page. `from` is its position in the index, from an earlier page. Keys below a listed prefix are skipped.
local _, prefix, delimited, from, limit = unpack(ARGV)
limit = tonumber(limit)
local low, high = from ~= '' and from or '[' .. prefix, '+'
if prefix ~= '' then high = '(' .. prefix:sub(1, -2) .. string.char(prefix:byte(-1) + 1) end
local keys, prefixes, seen, batch = {}, {}, 0, 1
while true do
  local members = redis.call('ZRANGEBYLEX', INDEX, low, high, 'LIMIT', 0, batch)
  if #members == 0 then return {keys, prefixes, ''} end
  batch = math.min(batch * 2, 256)
  for _, path in ipairs(members) do
    if seen >= limit then return {keys, prefixes, low} end
    local slash = delimited == '1' and path:find('/', #prefix + 1, true)
    seen = seen + 1
    low = '(' .. path
    if slash and redis.call('EXISTS', P .. path) == 1 then
      prefixes[#prefixes + 1] = path:sub(1, slash)
      -- '0' comes after '/'.
      low = '[' .. path:sub(1, slash - 1) .. '0'
      batch = 1
      break
    end
    local there = look(path)
    if there and not slash then
      keys[#keys + 1] = path
      keys[#keys + 1] = there
      -- The digest of another client's value costs more.
      if there:sub(1, 1) == '~' then seen = seen + 4 end
    end
  end
end
