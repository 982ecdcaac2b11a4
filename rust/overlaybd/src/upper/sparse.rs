//! What a sparse upper needs of the file system.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{fallocate, seek, FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::lsmt::{Extent, HEADER_SPACE, MAX_EXTENTS, SECTOR};

/// Unit of allocation, in bytes: writes cover whole ones, so that a hole is exactly what was never written.
pub const GRANULE: u64 = 4096;

/// Whether the file system tells data from holes in units of [`GRANULE`], tried out on an empty file of at least
/// three granules.
pub fn tells_holes(file: &File, base: u64) -> io::Result<bool> {
    let at = base + GRANULE;
    file.write_all_at(&[1; GRANULE as usize], at)?;
    let found = seek_data(file, base)? == Some(at) && seek_hole(file, at)? == at + GRANULE;
    Ok(punch(file, at, GRANULE)? && found && seek_data(file, base)?.is_none())
}

/// Deallocates a range, which then reads as zeroes. False if the file system cannot.
pub fn punch(file: &File, offset: u64, len: u64) -> io::Result<bool> {
    match fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The index of a sparse data section of `size` bytes: what the file system says is no hole.
///
/// `None` if there are more pieces than any sane image has.
pub fn scan(file: &File, size: u64) -> io::Result<Option<Vec<Extent>>> {
    let limit = HEADER_SPACE + size;
    let mut extents = Vec::new();
    let mut at = HEADER_SPACE;
    while let Some(start) = seek_data(file, at)?.filter(|start| *start < limit) {
        let end = seek_hole(file, start)?.min(limit);
        let (mut sector, last) = (start / SECTOR, end.div_ceil(SECTOR));
        while sector < last {
            let len = (last - sector).min(Extent::MAX_LEN);
            extents.push(Extent::data(sector - HEADER_SPACE / SECTOR, len, sector));
            sector += len;
        }
        if extents.len() as u64 > MAX_EXTENTS {
            return Ok(None);
        }
        at = end;
    }
    Ok(Some(extents))
}

fn seek_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(from)) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn seek_hole(file: &File, from: u64) -> io::Result<u64> {
    Ok(seek(file, SeekFrom::Hole(from))?)
}
