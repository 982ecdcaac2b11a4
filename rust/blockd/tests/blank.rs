//! Disks that are attached blank: what they are before, while and after they are bound to their layers.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use blockd::image::{
    compact_run, import, prefetch, seal, Attached, CompactRun, FilesOnly, LayerSpec, Layers, Manner, Output, Owner,
    Seek, UpperDir, UpperMode, UpperSpec, WorkingSet,
};
use blockd::Code;
use overlaybd::Image;
use rustix::io::Errno;

const SIZE: u64 = 1 << 20;
const CONTENT: [u8; 4096] = [0xa5; 4096];

struct Lab {
    dir: tempfile::TempDir,
    layers: Layers,
    specs: Vec<LayerSpec>,
}

impl Lab {
    /// With a layer all of whose bytes are alike.
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (raw, layer) = (dir.path().join("raw"), dir.path().join("layer"));
        std::fs::write(&raw, CONTENT.repeat(SIZE as usize / CONTENT.len())).unwrap();
        import(&raw, &layer, Output::default()).unwrap();
        Self { specs: vec![LayerSpec::file(layer)], layers: Layers::new(Box::new(FilesOnly)), dir }
    }

    fn upper(&self) -> UpperDir {
        UpperDir::lock(&UpperSpec { dir: self.dir.path().join("upper"), mode: UpperMode::Log }).unwrap()
    }

    fn disk(&self, size: u64) -> Attached {
        let manner = Manner { owner: Owner::default(), shared: false, record: true };
        Attached::blank("disk", 2, size, Some(self.upper()), manner)
    }

    /// What a binding gives a disk.
    fn content(&self, disk: &Attached) -> Image {
        let stack = self.layers.stack(&self.specs).unwrap();
        let upper = disk.upper().as_mut().unwrap().open(&stack, Some(SIZE)).unwrap();
        Image::writable(stack, upper.into()).unwrap()
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn a_blank_disk_reads_as_zeroes_and_takes_no_writes() {
    let lab = Lab::new();
    let disk = Arc::new(lab.disk(SIZE));
    let mut buf = CONTENT;
    assert_eq!((disk.size(), disk.is_blank(), disk.is_writable()), (SIZE, true, true));
    assert_eq!(disk.read(&mut buf, SIZE - 4096), Ok(4096));
    assert_eq!(buf, [0; 4096]);
    assert_eq!(disk.read(&mut buf, SIZE - 100), Ok(100));
    assert_eq!((disk.read(&mut buf, SIZE), disk.read(&mut buf, u64::MAX)), (Ok(0), Ok(0)));
    assert_eq!((disk.seek(0, Seek::Hole), disk.seek(0, Seek::Data)), (Ok(0), Err(Errno::NXIO)));
    disk.read_ahead(0, SIZE);
    assert_eq!((disk.write(&CONTENT, 0), disk.zero(0, 4096)), (Err(Errno::IO), Err(Errno::IO)));
    assert_eq!(disk.flush(), Ok(()));

    disk.bind(lab.content(&disk), &lab.specs).unwrap();
    assert!(!disk.is_blank());
    assert_eq!((disk.read(&mut buf, 0), buf), (Ok(4096), CONTENT));
    assert_eq!((disk.write(b"new", 0), disk.flush(), disk.read(&mut buf, 0)), (Ok(3), Ok(()), Ok(4096)));
    assert_eq!(&buf[..4], b"new\xa5");
    let layers = disk.image().unwrap().stack();
    assert_eq!(disk.file(&layers.layers()[0]), lab.specs[0].path);
}

#[test]
fn what_needs_layers_says_so() {
    let lab = Lab::new();
    let disk = lab.disk(SIZE);
    let output = |name: &str| lab.path(name);
    let run = |path: &Path| compact_run(&disk, &CompactRun { run: 0..1, path, output: Output::default() }, &lab.layers);
    let set = disk.recorder().unwrap().working_set();
    set.save(&output("set")).unwrap();
    let errors = [
        seal(&disk, &output("sealed"), &lab.layers).err(),
        run(&output("compacted")).err(),
        prefetch(&disk, &WorkingSet::load(&output("set")).unwrap()).err(),
        disk.image().err(),
    ];
    for error in errors {
        let error = error.unwrap();
        assert_eq!(error.code, Code::Invalid);
        assert!(error.message.contains("image disk is blank"), "{error}");
    }
}

#[test]
fn content_of_another_size_is_refused() {
    let lab = Lab::new();
    let disk = lab.disk(2 * SIZE);
    let error = disk.bind(lab.content(&disk), &lab.specs).unwrap_err();
    assert_eq!(error.code, Code::Invalid);
    assert!(disk.is_blank());
}

#[test]
fn of_many_who_bind_one_wins_and_readers_see_before_or_after() {
    let lab = Lab::new();
    let disk = lab.disk(SIZE);
    let content: Vec<Image> = (0..4).map(|_| lab.content(&disk)).collect();
    let (start, done) = (Barrier::new(content.len() + 2), AtomicBool::new(false));
    let results = std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let (mut buf, mut bound) = ([0; 4096], false);
                start.wait();
                while !bound || !done.load(Ordering::Acquire) {
                    let before = disk.is_blank();
                    disk.read(&mut buf, 4096).unwrap();
                    if buf == CONTENT {
                        bound = true;
                    } else {
                        assert!(buf == [0; 4096] && before && !bound);
                    }
                }
            });
        }
        let binding: Vec<_> = content
            .into_iter()
            .map(|image| {
                scope.spawn(|| {
                    start.wait();
                    disk.bind(image, &lab.specs)
                })
            })
            .collect();
        let results: Vec<_> = binding.into_iter().map(|thread| thread.join().unwrap()).collect();
        done.store(true, Ordering::Release);
        results
    });
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    assert!(results.iter().filter_map(|result| result.as_ref().err()).all(|error| error.code == Code::Exists));
}

#[test]
fn discarding_an_upper_that_was_never_opened_removes_it_too() {
    let lab = Lab::new();
    let stack = lab.layers.stack(&lab.specs).unwrap();
    let mut dir = lab.upper();
    drop(dir.open(&stack, Some(SIZE)).unwrap());
    drop(dir.create(3, SIZE, stack.top()).unwrap());
    drop(dir);
    lab.upper().discard().unwrap();
    assert!(!lab.path("upper").exists());
}
