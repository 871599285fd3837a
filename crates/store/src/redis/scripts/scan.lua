-- Finds other clients' keys, a step at a time.
local _, cursor, pattern, count = unpack(ARGV)
local answer = redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', count, 'TYPE', 'string')
local found = {}
local function add()
  -- With full memory the known keys are still listed.
  local added = #found > 0 and redis.pcall('ZADD', INDEX, unpack(found))
  found = {}
  return type(added) == 'table' and added.err and added.err:sub(1, 3) ~= 'OOM' and added
end
for _, key in ipairs(answer[2]) do
  local path = key:sub(#P + 1)
  if path ~= '' and not path:find('//surgetank/', 1, true) then
    found[#found + 1] = 0
    found[#found + 1] = path
  end
  if #found == 2000 then
    local failed = add()
    if failed then return failed end
  end
end
return add() or answer[1]
