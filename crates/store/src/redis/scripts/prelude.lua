-- The beginning of every script. ARGV[1] is the store's prefix; each script names its further arguments. KEYS are records and
-- index, so that a server of a cluster that lacks one of them changes nothing.
--
-- A record holds a file's attributes: ETAG PROOF BYTES MODIFIED CRC WORDS. It counts only while it fits the value. The proof is
-- the time at which the value would expire, in the far future and different for each version: another client's SET removes it.
-- Where values must not expire, and for other clients' values, the proof is a digest.
redis.replicate_commands()
local P = ARGV[1]
local INDEX, RECORDS, UPLOADS = P .. '//surgetank/index', P .. '//surgetank/records', P .. '//surgetank/uploads'
-- Milliseconds: a move of the key to another server delays it by less.
local STEP = 1048576
local WHOLE, PIECE, PIECES = 4096, 256, 16

local now
local function time()
  now = now or redis.call('TIME')
  return now
end

local function digest(key, size)
  if size <= WHOLE then return redis.sha1hex(redis.call('GET', key) or '') end
  local pieces = {size}
  for n = 0, PIECES - 1 do
    local at = math.floor((size - PIECE) * n / (PIECES - 1))
    pieces[#pieces + 1] = redis.call('GETRANGE', key, at, at + PIECE - 1)
  end
  return redis.sha1hex(table.concat(pieces, ' '))
end

local function stamp(key)
  local left = redis.call('PTTL', key)
  if left < 0 then return '0' end
  local t = time()
  return string.format('%d', math.floor((left + t[1] * 1000 + t[2] / 1000) / STEP + 0.5))
end

local function record(etag, proof, size, modified, crc, words)
  return table.concat({etag, proof, string.format('%d', size), modified, crc, words}, ' ')
end

local function nanoseconds()
  local t = time()
  return t[1] .. string.format('%06d', t[2]) .. '000'
end

-- The record of the value: false if the key is absent, nil if its value is not a file.
local function look(path)
  local key = P .. path
  local said = redis.call('HGET', RECORDS, path)
  local size = redis.pcall('STRLEN', key)
  if type(size) == 'table' then
    if size.err:find('WRONGTYPE', 1, true) then return nil end
    -- The key moves to another server of the cluster: nothing has been changed yet.
    return redis.call('STRLEN', key)
  end
  if size == 0 and redis.call('EXISTS', key) == 0 then
    -- After any change, even an empty one, Redis lets the rest of the script exceed the memory limit.
    if said then redis.call('HDEL', RECORDS, path) end
    if redis.call('ZSCORE', INDEX, path) then redis.call('ZREM', INDEX, path) end
    return false
  end
  local sum
  if said then
    local how, proof, bytes = said:match('^%S+ (%a)(%S+) (%d+) ')
    if tonumber(bytes) == size then
      if how == 't' then
        if stamp(key) == proof then return said end
      else
        sum = digest(key, size)
        if sum == proof then return said end
      end
    end
  end
  -- Another client's value, not seen before. Its age is unknown and counts from now.
  sum = sum or digest(key, size)
  local seen = record('~' .. sum, 'd' .. sum, size, nanoseconds(), '-', '{}')
  local kept = redis.pcall('HSET', RECORDS, path, seen)
  if type(kept) == 'table' and kept.err then return record('~' .. sum, 'd' .. sum, size, '0', '-', '{}') end
  redis.call('ZADD', INDEX, 0, path)
  return seen
end

local function etag_of(said)
  return said and said:match('^%S+')
end

-- The answer if a write at this path is refused, else nil. 'done': it was carried out and only its answer was lost.
local function refusal(path, when, wanted, etag)
  local there = look(path)
  if there == nil then return 'other' end
  local is = etag_of(there)
  if is == etag then return 'done' end
  if when == 'absent' and there or when == 'same' and is ~= wanted then return 'condition' end
end

-- Writes record and index after the value has its name.
local function keep(path, etag, mark, crc, words)
  local key = P .. path
  local size, proof = redis.call('STRLEN', key), 't' .. mark
  if mark == '0' then
    redis.call('PERSIST', key)
    proof = 'd' .. digest(key, size)
  else
    redis.call('PEXPIREAT', key, string.format('%.0f', mark * STEP))
  end
  redis.call('HSET', RECORDS, path, record(etag, proof, size, nanoseconds(), crc, words))
  redis.call('ZADD', INDEX, 0, path)
end
