"""MongoDB's own client, for tests: how another client sees the store's files, and files that it puts there.

usage: client.py URL BUCKET COMMAND …   (URL names the data base)
    put NAME FILE         get NAME FILE       list        rename NAME TO    delete NAME    count COLLECTION
    fill PREFIX COUNT     (empty files in ten directories)       lock NAME
    odd NAME              (a file whose name is a list)
    tomorrow NAME         (as if the client's clock were a day ahead)
    retire NAME SECONDS   (makes the ids of the file's chunks that much older, and removes the file's document)
"""

import datetime
import sys

import bson
import gridfs
import pymongo

url, bucket, command, *words = sys.argv[1:]
db = pymongo.MongoClient(url, serverSelectionTimeoutMS=10_000).get_default_database()
files = gridfs.GridFSBucket(db, bucket)
if command == "put":
    files.upload_from_stream(words[0], open(words[1], "rb"), metadata={"theirs": 7})
elif command == "get":
    files.download_to_stream_by_name(words[0], open(words[1], "wb"))
elif command == "list":
    for file in db[bucket].files.find().sort([("filename", 1), ("uploadDate", 1)]):
        print(file["filename"], file["length"], sorted(file.get("metadata") or {}))
elif command == "rename":
    files.rename(db[bucket].files.find_one({"filename": words[0]})["_id"], words[1])
elif command == "delete":
    for file in list(db[bucket].files.find({"filename": words[0]})):
        files.delete(file["_id"])
elif command == "count":
    print(db[bucket][words[0]].count_documents({}))
elif command == "fill":
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [f"{words[0]}{n % 10}/{n:05}" for n in range(int(words[1]))]
    make = lambda name: {"filename": name, "length": 0, "chunkSize": 261120, "uploadDate": now}
    db[bucket].files.insert_many([make(name) for name in names])
elif command == "odd":
    now = datetime.datetime.now(datetime.timezone.utc)
    db[bucket].files.insert_one({"filename": [words[0]], "length": 0, "chunkSize": 261120, "uploadDate": now})
elif command == "lock":
    db[bucket].surgetank.locks.insert_one({"_id": words[0], "by": bson.ObjectId()})
elif command == "tomorrow":
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=1)
    db[bucket].files.update_one({"filename": words[0]}, {"$set": {"uploadDate": later}})
elif command == "retire":
    file = db[bucket].files.find_one({"filename": words[0]})
    seconds = file["_id"].generation_time.timestamp() - int(words[1])
    new = bson.ObjectId(int(seconds).to_bytes(4, "big") + file["_id"].binary[4:])
    db[bucket].chunks.update_many({"files_id": file["_id"]}, {"$set": {"files_id": new}})
    db[bucket].files.delete_one({"_id": file["_id"]})
else:
    sys.exit(__doc__)
