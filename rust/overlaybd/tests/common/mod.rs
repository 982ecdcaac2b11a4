//! An image in a directory, kept the way a daemon keeps it, and a plain copy of what it should hold.

#![allow(dead_code, clippy::expect_used)]

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overlaybd::{
    compact, ByteSource, CompactOptions, DigestWriter, FileSource, Image, Layer, LayerInfo, ParentCheck, Stack, Upper,
    Uuid,
};

/// Which kind of upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Append,
    Sparse,
}

/// An image made of `0.data`, `1.data`, ... (the last one being the upper) with `N.index` beside those that need it.
pub struct Rig {
    pub dir: PathBuf,
    pub mode: Mode,
    pub size: u64,
    pub names: Vec<usize>,
    pub image: Image,
}

pub fn open_rw(path: &Path) -> File {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    file.unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub fn file_source(path: &Path) -> Arc<dyn ByteSource> {
    Arc::new(FileSource::new(File::open(path).expect("layer file")).expect("metadata"))
}

impl Rig {
    pub fn create(dir: &Path, mode: Mode, size: u64) -> Self {
        let upper = Self::new_upper(dir, 0, mode, size, Uuid::NIL);
        let image = Image::writable(Arc::new(Stack::empty()), upper).expect("image");
        Self { dir: dir.to_path_buf(), mode, size, names: vec![0], image }
    }

    fn data_path(dir: &Path, name: usize) -> PathBuf {
        dir.join(format!("{name}.data"))
    }

    fn index_path(dir: &Path, name: usize) -> PathBuf {
        dir.join(format!("{name}.index"))
    }

    fn new_upper(dir: &Path, name: usize, mode: Mode, size: u64, parent: Uuid) -> Arc<Upper> {
        let info = LayerInfo { virtual_size: size, uuid: Uuid::random().expect("random"), parent, user_tag: vec![] };
        let data = open_rw(&Self::data_path(dir, name));
        Arc::new(match mode {
            Mode::Append => Upper::create(data, open_rw(&Self::index_path(dir, name)), info).expect("upper"),
            Mode::Sparse => Upper::create_sparse(data, info).expect("sparse upper"),
        })
    }

    /// Opens what is in the directory after any end: whatever still has its index log (or says it is sparse) is opened
    /// as an upper, and all of those but the last are sealed again.
    pub fn reopen(dir: &Path, mode: Mode, size: u64) -> Self {
        let mut names: Vec<usize> = std::fs::read_dir(dir)
            .expect("directory")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(".data")?.parse().ok())
            .collect();
        names.sort_unstable();
        let open_upper = |name: usize| {
            let index = Some(Self::index_path(dir, name)).filter(|path| path.exists()).map(|path| open_rw(&path));
            Upper::open(open_rw(&Self::data_path(dir, name)), index)
        };
        let (last, below) = names.split_last().expect("at least the upper");
        let layers = below.iter().map(|name| {
            let layer = match open_upper(*name) {
                Ok(upper) => {
                    let (layer, _) = upper.seal().expect("seal again");
                    layer.sync().expect("sync");
                    let _ = std::fs::remove_file(Self::index_path(dir, *name));
                    layer
                }
                Err(_) => Layer::open(file_source(&Self::data_path(dir, *name))).expect("layer"),
            };
            Arc::new(layer)
        });
        let stack = Stack::open(layers.collect(), ParentCheck::Enforce).expect("stack");
        let (upper, names) = match open_upper(*last) {
            Ok(upper) => (Arc::new(upper), names),
            // Killed between creating the files of the next upper and writing its headers.
            Err(error) => {
                let first = match mode {
                    Mode::Append => Self::index_path(dir, *last),
                    Mode::Sparse => Self::data_path(dir, *last),
                };
                let header = std::fs::read(first).unwrap_or_default();
                let fresh = header.get(..4096).is_none_or(|header| header.iter().all(|byte| *byte == 0));
                assert!(fresh, "{last}: {error}");
                (Self::new_upper(dir, *last, mode, size, stack.top()), names)
            }
        };
        let image = Image::writable(Arc::new(stack), upper).expect("image");
        Self { dir: dir.to_path_buf(), mode, size, names, image }
    }

    /// The live snapshot.
    pub fn seal_and_continue(&mut self, sync: bool) {
        let name = self.names.last().expect("upper") + 1;
        let parent = self.image.upper().expect("upper").info().uuid;
        let next = Self::new_upper(&self.dir, name, self.mode, self.size, parent);
        let layer = self.image.seal_and_continue(next).expect("seal");
        if sync {
            layer.sync().expect("sync");
            let _ = std::fs::remove_file(Self::index_path(&self.dir, name - 1));
        }
        self.names.push(name);
    }

    /// Folds the layers `from..to` into one while the image is open.
    pub fn compact(&mut self, from: usize, to: usize, options: &CompactOptions) {
        let stack = self.image.stack();
        let run = &stack.layers()[from..to];
        run.iter().for_each(|layer| layer.sync().expect("sync"));
        let temporary = self.dir.join("compacted");
        let out = DigestWriter::new(File::create(&temporary).expect("file"));
        let (out, summary) = compact(run, out, options).expect("compact");
        let (_, digest) = out.finish();
        let source = file_source(&temporary);
        assert_eq!(overlaybd::sha256(&*source).expect("digest"), digest);
        assert_eq!(source.size(), summary.size);
        let layer = Arc::new(Layer::open(source).expect("compacted layer"));
        self.image.replace_layers(run, &layer).expect("replace");
        std::fs::rename(&temporary, Self::data_path(&self.dir, self.names[from])).expect("rename");
        for name in self.names.drain(from + 1..to) {
            std::fs::remove_file(Self::data_path(&self.dir, name)).expect("remove");
            let _ = std::fs::remove_file(Self::index_path(&self.dir, name));
        }
        let _ = std::fs::remove_file(Self::index_path(&self.dir, self.names[from]));
    }

    pub fn read_all(&self) -> Vec<u8> {
        let mut bytes = vec![0xEE; self.size as usize + 10];
        let len = self.image.read_at(&mut bytes, 0).expect("read");
        assert_eq!(len as u64, self.size);
        bytes.truncate(len);
        bytes
    }

    pub fn granule(&self) -> u64 {
        match self.mode {
            Mode::Append => 512,
            Mode::Sparse => 4096,
        }
    }
}

/// Bytes that tell where they come from: no two writes of a test look alike.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
