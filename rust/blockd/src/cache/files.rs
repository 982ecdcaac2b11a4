//! The two files of one layer.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{fallocate, seek, FallocateFlags, SeekFrom};

use super::layout::{block_len, checksum, decode_header, encode_header, Key, BLOCK, CHUNK, CHUNKS, ENTRY, HEADER};

/// A layer's open files. Positional I/O only; any thread may use them.
pub(super) struct Files {
    data: File,
    meta: File,
    size: u64,
}

/// What a verified read found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The bytes, as they were stored.
    Good,
    /// Something else: evicted meanwhile, torn, or rotten.
    Bad,
}

impl Files {
    /// Opens the files of `key`, or makes new ones if there are none or their header is not whole.
    pub(super) fn open_or_create(dir: &Path, key: &Key, size: u64) -> io::Result<Self> {
        if let Ok(files) = Self::open(dir, key) {
            if files.size == size {
                return Ok(files);
            }
        }
        std::fs::create_dir_all(dir)?;
        Self::remove(dir, key);
        let new = |name| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600).open(dir.join(name))
        };
        let files = Self { data: new(key.data())?, meta: new(key.meta())?, size };
        files.meta.write_all_at(&encode_header(key, size), 0)?;
        Ok(files)
    }

    /// Opens the files of `key`; their header says the size.
    pub(super) fn open(dir: &Path, key: &Key) -> io::Result<Self> {
        let old = |name| OpenOptions::new().read(true).write(true).open(dir.join(name));
        let (data, meta) = (old(key.data())?, old(key.meta())?);
        let mut page = [0; HEADER];
        meta.read_exact_at(&mut page, 0)?;
        let size = decode_header(key, &page).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { data, meta, size })
    }

    /// Removes the files of `key`. What cannot be removed is found again by the next start.
    pub(super) fn remove(dir: &Path, key: &Key) {
        for name in [key.meta(), key.data()] {
            if let Err(error) = std::fs::remove_file(dir.join(&name)) {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(%name, %error, "a cache file cannot be removed");
                }
            }
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes on disk, as the file system counts them.
    pub(super) fn allocated(&self) -> io::Result<u64> {
        Ok((self.data.metadata()?.blocks() + self.meta.metadata()?.blocks()) * 512)
    }

    /// Calls `present` for each block that has checksums, and gives back the space of blocks that have none.
    pub(super) fn load(&self, mut present: impl FnMut(u32)) -> io::Result<()> {
        let blocks = super::layout::blocks_of(self.size);
        let mut there = vec![0u64; (blocks as usize).div_ceil(64)];
        let mut page = [0; HEADER];
        each_page(&self.meta, &mut |at| {
            if at < HEADER as u64 {
                return Ok(());
            }
            let got = read_up_to(&self.meta, &mut page, at)?;
            let first = (at - HEADER as u64) / ENTRY as u64;
            for (index, entry) in page[..got].chunks_exact(ENTRY).enumerate() {
                let block = first + index as u64;
                if block < u64::from(blocks) && entry[..4] != [0; 4] {
                    there[block as usize / 64] |= 1 << (block % 64);
                    present(block as u32);
                }
            }
            Ok(())
        })?;
        let mut last = None;
        each_page(&self.data, &mut |at| {
            let block = (at / BLOCK).min(u64::from(blocks));
            if last != Some(block) && there.get(block as usize / 64).is_none_or(|bits| bits >> (block % 64) & 1 == 0) {
                self.punch(&self.data, block * BLOCK, BLOCK)?;
            }
            last = Some(block);
            Ok(())
        })
    }

    /// Fills `buf` from `offset` in block `block` and compares every chunk it touches with its checksum.
    ///
    /// Two system calls and no allocation. The first and the last chunk, if only a part of them is wanted, are read into
    /// buffers on the stack, the rest straight into `buf`.
    pub(super) fn read(&self, block: u32, offset: usize, buf: &mut [u8]) -> io::Result<Found> {
        let len = block_len(self.size, block);
        let (first, last) = (offset / CHUNK, (offset + buf.len() - 1) / CHUNK);
        let mut sums = [0u8; ENTRY];
        let sums = &mut sums[first * 4..(last + 1) * 4];
        if read_up_to(&self.meta, sums, entry_offset(block) + first as u64 * 4)? < sums.len() {
            return Ok(Found::Bad);
        }
        let (start, end) = (first * CHUNK, ((last + 1) * CHUNK).min(len));
        let (mut head, mut tail) = ([0u8; CHUNK], [0u8; CHUNK]);
        // Bytes of the first chunk before what is wanted; if nonzero, or if it is the only chunk and cut, it goes to `head`.
        let before = offset - start;
        let after = end - (offset + buf.len());
        let wanted = buf.len();
        let first_len = CHUNK.min(len - start);
        let single = first == last;
        let use_head = before > 0 || (single && after > 0);
        let use_tail = !single && after > 0;
        let head_len = if use_head { first_len } else { 0 };
        let tail_len = if use_tail { end - last * CHUNK } else { 0 };
        let from_head = if use_head { (first_len - before).min(wanted) } else { 0 };
        let from_tail = if use_tail { tail_len - after } else { 0 };
        let middle_at = if use_head { 1 } else { 0 };
        {
            let middle = &mut buf[from_head..wanted - from_tail];
            let at = u64::from(block) * BLOCK + start as u64;
            let whole = if use_head || use_tail {
                let total = head_len + middle.len() + tail_len;
                let (head, tail) = (&mut head[..head_len], &mut tail[..tail_len]);
                let mut parts = [IoSliceMut::new(head), IoSliceMut::new(middle), IoSliceMut::new(tail)];
                read_all(&self.data, &mut parts, at, total)?.is_some()
            } else {
                // The kernel copies into one buffer faster than into several.
                read_up_to(&self.data, middle, at)? == middle.len()
            };
            if !whole {
                return Ok(Found::Bad);
            }
        }
        let stored = |index: usize| {
            u32::from_le_bytes([sums[index * 4], sums[index * 4 + 1], sums[index * 4 + 2], sums[index * 4 + 3]])
        };
        let good = |index: usize, bytes: &[u8]| checksum(bytes, block, first + index) == stored(index);
        if use_head && !good(0, &head[..head_len]) || use_tail && !good(last - first, &tail[..tail_len]) {
            return Ok(Found::Bad);
        }
        let middle = &buf[from_head..wanted - from_tail];
        if !middle.chunks(CHUNK).enumerate().all(|(index, bytes)| good(index + middle_at, bytes)) {
            return Ok(Found::Bad);
        }
        buf[..from_head].copy_from_slice(&head[before..before + from_head]);
        buf[wanted - from_tail..].copy_from_slice(&tail[..from_tail]);
        Ok(Found::Good)
    }

    /// Stores a whole block, then its checksums: a block without them is not there.
    pub(super) fn write(&self, block: u32, bytes: &[u8]) -> io::Result<()> {
        self.data.write_all_at(bytes, u64::from(block) * BLOCK)?;
        let mut entry = [0u8; ENTRY];
        for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
            entry[index * 4..index * 4 + 4].copy_from_slice(&checksum(chunk, block, index).to_le_bytes());
        }
        self.meta.write_all_at(&entry, entry_offset(block))
    }

    /// Removes a block: its checksums first. `alone`: no other block has checksums on the same page of the meta file.
    pub(super) fn erase(&self, block: u32, alone: bool) -> io::Result<()> {
        let at = entry_offset(block);
        if alone {
            self.punch(&self.meta, at - at % CHUNK as u64, CHUNK as u64)?;
        } else {
            self.meta.write_all_at(&[0; ENTRY], at)?;
        }
        self.punch(&self.data, u64::from(block) * BLOCK, BLOCK)
    }

    fn punch(&self, file: &File, at: u64, len: u64) -> io::Result<()> {
        Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)?)
    }
}

/// Blocks whose checksums share a page.
pub(super) const SHARING: u32 = (CHUNK / ENTRY) as u32;

fn entry_offset(block: u32) -> u64 {
    HEADER as u64 + u64::from(block) * ENTRY as u64
}

const _: () = assert!(CHUNKS * 4 == ENTRY && CHUNK % ENTRY == 0 && HEADER % CHUNK == 0);

/// Calls `visit` with the offset of each allocated page.
fn each_page(file: &File, visit: &mut dyn FnMut(u64) -> io::Result<()>) -> io::Result<()> {
    let end = file.metadata()?.len();
    let mut at = 0;
    while at < end {
        let Some(data) = find(file, SeekFrom::Data(at))? else { return Ok(()) };
        let hole = find(file, SeekFrom::Hole(data))?.unwrap_or(end);
        let mut page = data - data % CHUNK as u64;
        while page < hole {
            visit(page)?;
            page += CHUNK as u64;
        }
        at = hole.max(data + 1);
    }
    Ok(())
}

fn find(file: &File, from: SeekFrom) -> io::Result<Option<u64>> {
    match seek(file, from) {
        Ok(at) => Ok(Some(at)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Reads until `buf` is full or the file ends; returns the bytes read.
fn read_up_to(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < buf.len() {
        match file.read_at(&mut buf[got..], offset + got as u64) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Fills all parts from `offset`, or tells that the file ends before.
fn read_all(file: &File, mut parts: &mut [IoSliceMut<'_>], mut offset: u64, total: usize) -> io::Result<Option<()>> {
    let mut left = total;
    while left > 0 {
        match rustix::io::preadv(file, parts, offset) {
            Ok(0) => return Ok(None),
            Ok(n) => {
                left -= n;
                offset += n as u64;
                IoSliceMut::advance_slices(&mut parts, n);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize, seed: u8) -> Vec<u8> {
        (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0] ^ seed).collect()
    }

    #[test]
    fn every_part_of_a_block_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new(&[b"x"], true);
        let size = BLOCK + 10_000;
        let files = Files::open_or_create(dir.path(), &key, size).unwrap();
        let blocks = [bytes(BLOCK as usize, 1), bytes(10_000, 2)];
        for (block, content) in blocks.iter().enumerate() {
            files.write(block as u32, content).unwrap();
        }
        for (block, content) in blocks.iter().enumerate() {
            let edges = [0, 1, 511, 512, 4095, 4096, 4097, 8191, 8192, 8193, 9999, 10_000, 12_288, BLOCK as usize];
            for (start, end) in edges.iter().flat_map(|a| edges.iter().map(move |b| (*a, *b))) {
                if start >= end || end > content.len() {
                    continue;
                }
                let mut buf = vec![0xaa; end - start];
                assert_eq!(files.read(block as u32, start, &mut buf).unwrap(), Found::Good, "{block} {start}..{end}");
                assert!(buf == content[start..end], "{block} {start}..{end}");
            }
        }
    }

    #[test]
    fn damage_and_absence_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new(&[b"x"], true);
        let files = Files::open_or_create(dir.path(), &key, 3 * BLOCK).unwrap();
        let mut buf = [0; 100];
        assert_eq!(files.read(1, 5000, &mut buf).unwrap(), Found::Bad);
        files.write(1, &bytes(BLOCK as usize, 1)).unwrap();
        assert_eq!(files.read(1, 5000, &mut buf).unwrap(), Found::Good);
        files.data.write_all_at(&[0x55], BLOCK + 5050).unwrap();
        assert_eq!(files.read(1, 5000, &mut buf).unwrap(), Found::Bad);
        assert_eq!(files.read(1, 0, &mut buf).unwrap(), Found::Good);
        // The same bytes in another place do not pass.
        let mut whole = vec![0; BLOCK as usize];
        files.data.read_exact_at(&mut whole, BLOCK).unwrap();
        files.data.write_all_at(&whole, 2 * BLOCK).unwrap();
        let mut entry = [0; ENTRY];
        files.meta.read_exact_at(&mut entry, entry_offset(1)).unwrap();
        files.meta.write_all_at(&entry, entry_offset(2)).unwrap();
        assert_eq!(files.read(2, 0, &mut buf).unwrap(), Found::Bad);
    }

    #[test]
    fn loading_finds_blocks_and_frees_what_has_no_checksums() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new(&[b"x"], true);
        let size = 40 * BLOCK + 1;
        let files = Files::open_or_create(dir.path(), &key, size).unwrap();
        for block in [0, 3, 17, 39] {
            files.write(block, &bytes(BLOCK as usize, block as u8)).unwrap();
        }
        files.write(40, &[7]).unwrap();
        files.data.write_all_at(&bytes(BLOCK as usize, 9), 5 * BLOCK).unwrap();
        let before = files.allocated().unwrap();
        let files = Files::open(dir.path(), &key).unwrap();
        let mut found = Vec::new();
        files.load(|block| found.push(block)).unwrap();
        assert_eq!(found, [0, 3, 17, 39, 40]);
        assert_eq!(before - files.allocated().unwrap(), BLOCK);
        files.erase(17, false).unwrap();
        files.erase(40, true).unwrap();
        found.clear();
        files.load(|block| found.push(block)).unwrap();
        assert_eq!(found, [0, 3]); // 39 shared its page with 40
    }

    /// `docs/formats/blockd-cache.md`, byte by byte; the CRC is computed bit by bit.
    #[test]
    fn the_bytes_are_those_of_the_format() {
        fn crc(start: u32, bytes: &[u8]) -> u32 {
            let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            !bytes.iter().fold(!start, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
        }
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new(&[b"x"], true);
        let size = BLOCK + 5000;
        let files = Files::open_or_create(dir.path(), &key, size).unwrap();
        let content = bytes(5000, 3);
        files.write(1, &content).unwrap();
        let meta = std::fs::read(dir.path().join(key.meta())).unwrap();
        let mut expected = b"AENVBLK\x01".to_vec();
        expected.extend_from_slice(&262_144_u64.to_le_bytes());
        expected.extend_from_slice(&size.to_le_bytes());
        expected.extend_from_slice(key.as_str().as_bytes());
        expected.resize(4092, 0);
        expected.extend_from_slice(&crc(0, &expected).to_le_bytes());
        expected.resize(4096 + 256, 0);
        for (chunk, part) in [(64_u32, &content[..4096]), (65, &content[4096..])] {
            expected.extend_from_slice(&crc(chunk.wrapping_mul(0x9e37_79b1), part).to_le_bytes());
        }
        expected.resize(4096 + 512, 0);
        assert!(meta == expected);
        let data = std::fs::read(dir.path().join(key.data())).unwrap();
        assert!(data[BLOCK as usize..] == content && data[..BLOCK as usize].iter().all(|byte| *byte == 0));
    }
}
