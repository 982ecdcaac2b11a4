//! Bringing order to an upper's directory after a kill at any moment of a seal. See [`super::upper`] for the names.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use overlaybd::{FileSource, Image, Layer, ParentCheck, Place, Stack, Upper, HEADER_SPACE, SECTOR};

use crate::image::files;
use crate::image::upper::{open_rw, UpperDir};
use crate::{Code, Error};

/// Sectors looked up at a time while merging.
const LOOKUP: u64 = 1 << 16;
/// Bytes copied at a time while merging.
const COPY: usize = 1 << 20;

/// Which files of one number there are.
#[derive(Default, Clone, Copy)]
struct Files {
    data: bool,
    index: bool,
    link: bool,
}

fn scan(dir: &UpperDir) -> io::Result<BTreeMap<u64, Files>> {
    let mut found: BTreeMap<u64, Files> = BTreeMap::new();
    for entry in std::fs::read_dir(dir.path())? {
        let name = entry?.file_name();
        let Some((number, kind)) = name.to_str().and_then(|name| name.split_once('.')) else { continue };
        let Ok(number) = number.parse() else { continue };
        let files = found.entry(number).or_default();
        match kind {
            "data" => files.data = true,
            "index" => files.index = true,
            "layer" => files.link = true,
            _ => {}
        }
    }
    Ok(found)
}

/// Numbers of the uppers that are there. Other files may be of layers that are not on stable storage yet.
pub fn uppers(dir: &UpperDir) -> io::Result<Vec<u64>> {
    Ok(scan(dir)?.into_iter().filter(|(_, files)| files.data).map(|(n, _)| n).collect())
}

/// Undoes seals that did not happen and finishes those that did.
pub fn settle_seals(dir: &UpperDir) -> io::Result<()> {
    for (n, files) in scan(dir)? {
        if files.link {
            let target = std::fs::read_link(dir.link(n))?;
            if files.data {
                undo(&dir.data(n), &target)?;
            } else if let Err(error) = make_durable(&target, &dir.index(n)) {
                // What can be done for the layer needs its file. Whoever opens it learns what is wrong with it.
                tracing::warn!(layer = %target.display(), %error, "a sealed layer cannot be brought to stable storage");
                continue;
            }
            files::remove(&dir.link(n))?;
        }
        if !files.data && files.index {
            files::remove(&dir.index(n))?;
        }
    }
    Ok(())
}

/// Removes the second name of an upper's data, under which it would have become a layer.
fn undo(data: &Path, target: &Path) -> io::Result<()> {
    let same = |a: &std::fs::Metadata, b: &std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    match target.symlink_metadata() {
        Ok(found) if same(&found, &data.metadata()?) => std::fs::remove_file(target),
        _ => Ok(()),
    }
}

/// Brings a layer that was sealed in place to stable storage, sealing it again if its end never reached the disk.
fn make_durable(target: &Path, index: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let data = match open_rw(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    if index.exists() && is_layer(data.try_clone()?) {
        data.sync_all()?;
    } else {
        // A sparse upper has no index log, and its header still says what it was.
        let index = index.exists().then(|| open_rw(index)).transpose()?;
        let (layer, _) = match Upper::open(data, index) {
            Err(overlaybd::OpenUpperError::Kind(_) | overlaybd::OpenUpperError::Sealed) => return Ok(()),
            upper => upper?.seal()?,
        };
        layer.sync()?;
    }
    Ok(files::sync_parent(target)?)
}

fn is_layer(file: std::fs::File) -> bool {
    let Ok(source) = FileSource::new(file) else { return false };
    // Stacking it reads and checks its index.
    Layer::open(Arc::new(source)).is_ok_and(|layer| Stack::open(vec![Arc::new(layer)], ParentCheck::Ignore).is_ok())
}

/// Opens the upper in a directory whose seals are settled, if there is one that was ever used, and sets which it is.
pub fn open(dir: &mut UpperDir, stack: &Arc<Stack>) -> Result<Option<Upper>, Error> {
    let what = format!("opening upper {}", dir.path().display());
    let failed = |e: io::Error| Error::io(&what, &e);
    let mut numbers = Vec::new();
    for (n, files) in scan(dir).map_err(failed)? {
        if !files.data {
            continue;
        }
        if is_unused(dir, n).map_err(failed)? {
            dir.remove_upper(n).map_err(failed)?;
        } else {
            numbers.push(n);
        }
    }
    match numbers[..] {
        [] => Ok(None),
        [n] => {
            dir.current = n;
            Ok(Some(open_files(dir, n)?))
        }
        [n, next] => {
            dir.current = n;
            let (below, above) = (open_files(dir, n)?, open_files(dir, next)?);
            if above.info().parent != below.info().uuid {
                return Err(Error::new(
                    Code::Corrupt,
                    format!("{what}: {n}.data and {next}.data do not belong together"),
                ));
            }
            let upper = merge(stack, below, above).map_err(|e| Error::caused(Code::Corrupt, &what, &*e))?;
            dir.remove_upper(next).map_err(failed)?;
            Ok(Some(upper))
        }
        _ => Err(Error::new(Code::Corrupt, format!("{what}: it holds {} uppers", numbers.len()))),
    }
}

fn open_files(dir: &UpperDir, n: u64) -> Result<Upper, Error> {
    let what = || format!("opening upper {}", dir.data(n).display());
    let data = open_rw(&dir.data(n)).map_err(|e| Error::io(what(), &e))?;
    let index = match open_rw(&dir.index(n)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        opened => Some(opened.map_err(|e| Error::io(what(), &e))?),
    };
    Upper::open(data, index).map_err(|e| Error::caused(Code::Corrupt, what(), &e))
}

/// Whether upper `n` was only being made. Its index log, or without one its data file, then has no header: the first flush
/// would have brought it to stable storage.
fn is_unused(dir: &UpperDir, n: u64) -> io::Result<bool> {
    let file = match open_rw(&dir.index(n)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => open_rw(&dir.data(n))?,
        opened => opened?,
    };
    let mut header = [0u8; HEADER_SPACE as usize];
    match file.read_exact_at(&mut header, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(true),
        Err(error) => Err(error),
        Ok(()) => Ok(header == [0; HEADER_SPACE as usize]),
    }
}

/// Undoes a seal that did not happen although writes had gone to the next upper already: repeats those in the one below.
/// A kill during this leaves both uppers, and everything is repeated.
fn merge(stack: &Arc<Stack>, below: Upper, above: Upper) -> Result<Upper, Box<dyn std::error::Error>> {
    let below = Arc::new(below);
    let to = Image::writable(stack.clone(), below.clone())?;
    let from = Image::writable(Arc::new(Stack::empty()), Arc::new(above))?;
    let end = from.size().div_ceil(SECTOR);
    let mut buf = vec![0; COPY];
    let mut at = 0;
    while at < end {
        let step = (at + LOOKUP).min(end);
        for segment in from.resolve(at, step) {
            let (mut offset, end) = (segment.offset * SECTOR, segment.end() * SECTOR);
            match segment.place {
                Place::Hole => {}
                Place::Zero => to.zero_at(offset, end - offset)?,
                Place::Data { .. } => {
                    while offset < end {
                        let part = &mut buf[..(end - offset).min(COPY as u64) as usize];
                        from.read_at(part, offset)?;
                        to.write_at(part, offset)?;
                        offset += part.len() as u64;
                    }
                }
            }
        }
        at = step;
    }
    to.flush()?;
    drop(to);
    Arc::into_inner(below).ok_or_else(|| "the merged upper is still in use".into())
}
