-- Reads a range; its end is exclusive.
local _, path, wanted, from, to = unpack(ARGV)
local there = look(path)
if not there then return {'missing'} end
if wanted ~= '' and etag_of(there) ~= wanted then return {'condition'} end
return {'ok', redis.call('GETRANGE', P .. path, from, to - 1)}
